/** A list of rows of equal height, of which only the visible ones are elements. */

import { el, fill } from "./dom.js";

const SPARE_ROWS = 6; // above and below the visible ones

/**
 * Return a list with the methods `show(count)`, `refresh()` and `element`.
 *
 * `render(index)` returns the contents of a row, `open(index)` is called by a click or Enter.
 */
export function virtualList({ label, rowHeight, render, open, describe, kind = "" }) {
  let count = 0;
  let active = 0;
  const rows = el("div", { class: "rows", role: "presentation" });
  const element = el("div", { class: `virtual ${kind}`, role: "listbox", tabindex: "0", "aria-label": label,
    on: { scroll: () => requestAnimationFrame(draw), keydown: onKey } }, rows);

  function draw() {
    rows.style.height = `${count * rowHeight}px`;
    const top = element.scrollTop;
    const first = Math.max(0, Math.floor(top / rowHeight) - SPARE_ROWS);
    const last = Math.min(count, Math.ceil((top + element.clientHeight) / rowHeight) + SPARE_ROWS);
    const shown = [];
    for (let index = first; index < last; index += 1) shown.push(row(index));
    fill(rows, shown);
    if (count) element.setAttribute("aria-activedescendant", `row-${active}`);
    else element.removeAttribute("aria-activedescendant");
  }

  function row(index) {
    const node = el("div", {
      class: "row", role: "option", id: `row-${index}`, "aria-selected": String(index === active),
      "aria-posinset": index + 1, "aria-setsize": count,
      "aria-label": describe ? describe(index) : null,
      on: { click: () => choose(index) },
    }, render(index));
    node.style.top = `${index * rowHeight}px`;
    node.style.height = `${rowHeight}px`;
    return node;
  }

  function choose(index) {
    active = index;
    open(index);
  }

  function onKey(event) {
    const page = Math.max(1, Math.floor(element.clientHeight / rowHeight) - 1);
    const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page,
      Home: -count, End: count };
    if (event.key === "Enter" && count) choose(active);
    else if (event.key in moves) move(active + moves[event.key]);
    else return;
    event.preventDefault();
  }

  function move(index) {
    active = Math.max(0, Math.min(count - 1, index));
    const top = active * rowHeight;
    const bottom = top + rowHeight - element.clientHeight;
    if (top < element.scrollTop) element.scrollTop = top;
    else if (bottom > element.scrollTop) element.scrollTop = bottom;
    draw();
  }

  function show(number, keepPosition = false) {
    count = number;
    if (!keepPosition) {
      active = 0;
      element.scrollTop = 0;
    }
    active = Math.min(active, Math.max(0, count - 1));
    draw();
  }

  new ResizeObserver(draw).observe(element);
  return { element, show, refresh: draw };
}
