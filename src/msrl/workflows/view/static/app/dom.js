/** Elements. Texts are set as text nodes only, so no markup in them takes effect. */

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "rect", "line", "path", "polyline", "text", "g", "title"]);

/**
 * Return an element.
 *
 * `properties`: class, on (listeners by event), data (dataset), and attributes. Children are
 * elements or values that are shown as text.
 */
export function el(tag, properties = {}, ...children) {
  const element = SVG_TAGS.has(tag)
    ? document.createElementNS(SVG, tag)
    : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.setAttribute("class", value);
    else if (name === "on") listen(element, value);
    else if (name === "data") Object.assign(element.dataset, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  append(element, children);
  return element;
}

function listen(element, listeners) {
  for (const [event, listener] of Object.entries(listeners)) {
    element.addEventListener(event, listener);
  }
}

function append(element, children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
}

/** Replace the children of an element. */
export function fill(element, ...children) {
  element.replaceChildren();
  append(element, children);
  return element;
}

/** Return a labeled control. */
export function field(label, control, kind = "") {
  return el("label", { class: `field ${kind}` }, el("span", {}, label), control);
}

/** Return a select element of [value, label] pairs. */
export function select(pairs, value, onChange) {
  const element = el("select", { on: { change: () => onChange(element.value) } });
  for (const [key, label] of pairs) {
    element.append(el("option", { value: key, selected: String(key) === String(value) }, label));
  }
  return element;
}

/** Return a group of buttons of which one is pressed. */
export function segments(label, pairs, value, onChange) {
  const buttons = pairs.map(([key, text]) =>
    el("button", {
      type: "button",
      "aria-pressed": String(key === value),
      on: {
        click: () => {
          buttons.forEach((button, i) =>
            button.setAttribute("aria-pressed", String(pairs[i][0] === key)),
          );
          onChange(key);
        },
      },
    }, text),
  );
  return el("div", { class: "segments", role: "group", "aria-label": label }, buttons);
}

export function card(title, ...children) {
  return el("section", { class: "card" }, title ? el("h2", {}, title) : null, children);
}

/** Return a function that calls `action` once, `delay` milliseconds after its last call. */
export function debounced(action, delay) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...values), delay);
  };
}

/** Return a list of terms and descriptions. */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { class: "facts" }, shown.map(([name, value]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

/** Return a table with a header row. Cells are elements or values. */
export function table(head, rows, kind = "") {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": head.join(", ") },
    el("table", { class: kind },
      el("thead", {}, el("tr", {}, head.map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map((cells) =>
        el("tr", {}, cells.map((cell, i) =>
          i === 0 ? el("th", { scope: "row" }, cell) : el("td", {}, cell)))))));
}

/** Save a text as a file. */
export function download(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  el("a", { href: address, download: name.replace(/[^\w.@-]+/g, "-") }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
