/** Runs: a table with state, last metrics, tags and notes, which sorts and filters. */

import { runColor, state } from "./state.js";
import { debounced, el, field, fill } from "./dom.js";
import { count, digits, duration, visible } from "./text.js";
import { KEY_METRICS, lastValue, stepText } from "./overview.js";

const MAX_METRICS = 4;
const MAX_CURVES = 8; // runs whose curves are drawn at first: as many as there are colors
const order = { name: "started", sign: -1 };

/** Return the table. `onChange` is called when other runs are shown in the curves. */
export function runTable(onChange) {
  const body = el("tbody", {});
  const head = el("tr", {});
  const status = el("span", { class: "quiet small", role: "status" });
  const search = el("input", { type: "search", placeholder: "name, state, tag, note", on: { input: debounced(() => draw(), 80) } });
  const columns = runColumns();
  function draw() {
    const wanted = search.value.toLowerCase();
    const rows = state.runs.map((_, number) => number).filter((number) => searched(state.runs[number]).includes(wanted));
    const { value } = columns.find(({ name }) => name === order.name) ?? columns[0];
    rows.sort((a, b) => order.sign * compared(value(state.runs[a]), value(state.runs[b])));
    status.textContent = `${count(rows.length, "run")} of ${state.runs.length}`;
    fill(head, el("th", { scope: "col" }, "curves"), columns.map((column) => sortHeader(column, draw)),
      el("th", { scope: "col" }, "tags"), el("th", { scope: "col" }, "note"));
    fill(body, rows.map((number) => runRow(number, columns, onChange)));
  }
  draw();
  return el("section", { class: "card" }, el("div", { class: "toolbar" }, field("Runs", search), status),
    el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" },
      el("table", { class: "run-table" }, el("thead", {}, head), body)));
}

/** Hide the curves of all but the newest runs. */
export function hideOldRuns() {
  const newest = state.runs.map((_, number) => number).sort((a, b) => compared(started(state.runs[b]), started(state.runs[a])));
  newest.slice(MAX_CURVES).forEach((number) => state.hidden.add(number));
}

function runColumns() {
  const metrics = KEY_METRICS.filter((name) => state.runs.some((run) => name in run.metrics.values)).slice(0, MAX_METRICS);
  return [
    { name: "name", value: (run) => run.name },
    { name: "state", value: (run) => run.state },
    { name: "step", value: ({ metrics: { steps } }) => steps[steps.length - 1], text: (_, run) => stepText(run) },
    { name: "started", value: started, text: (time) => time.slice(0, 16).replace("T", " ") },
    { name: "time", value: ({ metrics: { time } }) => time[time.length - 1], text: duration },
    ...metrics.map((name) => ({ name, value: (run) => lastValue(run.metrics.values[name]), text: digits })),
  ];
}

function started(run) {
  return run.attempts[0]?.started ?? "";
}

function searched({ name, state: runState, tags, note }) {
  return [name, runState, ...tags, note].join("\n").toLowerCase();
}

/** Compare numbers or texts; missing values are the smallest. */
function compared(a, b) {
  const [isMissing, isOtherMissing] = [a ?? null, b ?? null].map((value) => value === null);
  if (isMissing || isOtherMissing) return Number(isOtherMissing) - Number(isMissing);
  return a < b ? -1 : Number(a > b);
}

function sortHeader({ name }, draw) {
  const isSorted = name === order.name;
  return el("th", { scope: "col", "aria-sort": isSorted ? (order.sign > 0 ? "ascending" : "descending") : null },
    el("button", { type: "button", class: "sort", on: { click: () => {
      order.sign = isSorted ? -order.sign : 1;
      order.name = name;
      draw();
    } } }, name, isSorted ? (order.sign > 0 ? " \u2191" : " \u2193") : ""));
}

function runRow(number, columns, onChange) {
  const run = state.runs[number];
  const shown = el("input", { type: "checkbox", checked: !state.hidden.has(number), "aria-label": `Curves of ${visible(run.name)}`,
    on: { change: () => {
      if (shown.checked) state.hidden.delete(number);
      else state.hidden.add(number);
      onChange();
    } } });
  const error = run.attempts[run.attempts.length - 1]?.error;
  return el("tr", {}, el("td", {}, shown), columns.map(({ name, value, text }) => {
    const cell = value(run);
    const shownText = cell === null || cell === undefined ? "-" : visible((text ?? String)(cell, run));
    if (name === "name") return el("th", { scope: "row" }, el("i", { class: `dot run-${runColor(number)}` }), shownText);
    return el("td", { class: name === "state" ? `state-${cell}` : "", title: name === "state" && error ? visible(error) : null }, shownText);
  }), el("td", {}, editable(run, number, "tags", run.tags.join(", "))), el("td", {}, editable(run, number, "note", run.note)));
}

/** Return the tags or note of a run: a field if the server of the page can save it. */
function editable(run, number, name, text) {
  if (!state.saveNotes) return visible(text) || "-";
  const input = el("input", { type: "text", value: text, "aria-label": `${name} of ${visible(run.name)}`, maxlength: 1000,
    on: { change: async () => {
      const value = name === "tags" ? input.value.split(",").map((tag) => tag.trim()).filter(Boolean) : input.value.trim();
      run[name] = value;
      input.classList.toggle("bad", !(await state.saveNotes(number, { tags: run.tags, note: run.note })));
    } } });
  return input;
}
