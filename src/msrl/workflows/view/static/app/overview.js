/** Overview: curves of all runs, their configurations and differences, and their lineage. */

import { address, go, remember, route, runColor, setting, state } from "./state.js";
import { card, debounced, el, facts, field, fill, segments, select, table } from "./dom.js";
import { digits, duration, visible } from "./text.js";
import { AXES, curveCard, marks, metricLine } from "./charts.js";
import { runTable } from "./runs.js";

export const KEY_METRICS = ["reward/mean", "eval/pass@1", "eval/reward", "rollout/response_length",
  "train/loss", "eval/loss", "train/entropy", "train/kl", "train/grad_norm", "rollout/truncated"];
const TABS = [["curves", "Curves"], ["config", "Configuration"], ["lineage", "Lineage"]];

export function overviewPage(main) {
  const tab = route().query.get("tab") ?? "curves";
  const body = el("div", {});
  const pages = { curves, config: configuration, lineage };
  fill(main,
    el("h1", {}, state.runs.length > 1 ? "Runs" : visible(state.runs[0].name)),
    state.runs.length > 1 ? [runTable(() => curves.redraw?.()), difference()] : runCard(state.runs[0]),
    segments("Part of the overview", TABS, tab, (key) => go(["overview"], { tab: key })),
    body);
  (pages[tab] ?? curves)(body);
}

function runCard(run) {
  const last = run.attempts[run.attempts.length - 1] ?? {};
  const names = KEY_METRICS.filter((name) => lastValue(run.metrics.values[name]) !== null).slice(0, 4);
  return el("section", { class: "card run" },
    facts([
      ["state", run.state],
      ["steps", stepText(run)],
      ["time", run.metrics.time.length ? duration(run.metrics.time[run.metrics.time.length - 1]) : ""],
      ...names.map((name) => [name, digits(lastValue(run.metrics.values[name]))]),
      ["attempts", run.attempts.length > 1 ? run.attempts.length : ""],
      ["tags", visible(run.tags.join(", "))], ["note", visible(run.note)],
    ]),
    last.error ? el("p", { class: "bad" }, visible(last.error)) : null,
    run.leftOut.map((text) => el("p", { class: "bad" }, visible(text))),
    run.metrics.notes.length ? notes(run.metrics.notes) : null);
}

/** Return the last step of a run, and the number of its steps if it is known. */
export function stepText({ metrics: { steps }, attempts: starts }) {
  const total = starts[starts.length - 1]?.num_steps;
  return steps.length ? `${steps[steps.length - 1]}${total ? ` of ${total}` : ""}` : "none";
}

export function lastValue(values) {
  return values?.findLast((value) => value !== null) ?? null;
}

function notes(rows) {
  return el("details", {}, el("summary", {}, `Notes of ${rows.length} steps`),
    el("ul", {}, rows.slice(0, 200).map(([step, ...texts]) =>
      el("li", {}, `Step ${step}: ${visible(texts.join("; "))}`))));
}

function difference() {
  const keys = differingKeys();
  return el("p", {}, keys.length === 1 ? "1 setting differs. " : `${keys.length} settings differ. `,
    el("a", { href: address(["overview"], { tab: "config" }) }, "Compare configurations"));
}

function curves(body) {
  const grid = el("div", {});
  const search = el("input", { type: "search", placeholder: "reward, length ...",
    on: { input: debounced(() => curves.redraw(), 150) } });
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02,
    value: state.smoothing, on: { input: () => {
      state.smoothing = Number(slider.value);
      remember("smoothing", slider.value);
      level.textContent = digits(state.smoothing);
      redraw(grid);
    } } });
  const level = el("output", {}, digits(state.smoothing));
  const axes = Object.keys(AXES).filter((name) => state.runs.some((run) => AXES[name].values(run.metrics)));
  const log = el("input", { type: "checkbox", checked: state.isLog, on: { change: () => {
    state.isLog = log.checked;
    redraw(grid);
  } } });
  curves.redraw = () => drawGrid(grid, search.value);
  fill(body,
    el("div", { class: "toolbar" }, field("Metrics", search),
      field("Smoothing", el("span", { class: "with-value" }, slider, level)),
      field("X axis", select(axes.map((name) => [name, AXES[name].label]), state.axis, (name) => {
        state.axis = name;
        remember("axis", name);
        curves.redraw();
      })),
      el("label", { class: "toggles" }, log, "Logarithmic y axis")),
    legend(), grid);
  curves.redraw();
}

const redraw = debounced((grid) => {
  grid.querySelectorAll(".curve").forEach((figure) => figure.redraw());
}, 40);

function legend() {
  const has = (kind) => state.runs.some(({ markers }) => markers[kind].length);
  return el("p", { class: "quiet small" }, "Drag in a chart to zoom, double-click to reset.",
    has("checkpoints") ? " Triangles at the bottom mark checkpoints." : "",
    has("evaluations") ? " Circles at the top mark evaluations." : "",
    has("restarts") ? " Dashed lines mark restarts." : "");
}

function drawGrid(grid, text) {
  const names = [...new Set(state.runs.flatMap((run) => Object.keys(run.metrics.values)))];
  const wanted = names.filter((name) => name.toLowerCase().includes(text.toLowerCase()));
  const groups = new Map();
  const key = text ? [] : KEY_METRICS.filter((name) => lines(name).length);
  if (key.length) groups.set("Key metrics", key);
  for (const name of wanted.sort()) {
    const group = name.includes("/") ? name.split("/")[0] : "other";
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  const markers = marks();
  fill(grid, [...groups].map(([group, members], i) =>
    el("details", { class: "group", open: i === 0 || Boolean(text) },
      el("summary", {}, el("h2", {}, group), el("span", { class: "quiet" }, ` ${members.length}`)),
      el("div", { class: "grid" }, members.map((name) => [name, lines(name)]).filter(([, drawn]) => drawn.length)
        .map(([name, drawn]) => curveCard(name, drawn, markers))))),
  wanted.length ? null : el("p", { class: "quiet" }, "No metric has this name."));
  grid.querySelectorAll("details").forEach((details) =>
    details.addEventListener("toggle", () => redraw(details)));
}

function lines(name) {
  return state.runs.map((_, number) => metricLine(number, name)).filter(Boolean);
}

/** Return the keys whose values are not the same in all runs. */
export function differingKeys() {
  const keys = [...new Set(state.runs.flatMap((run) => Object.keys(run.config)))];
  return keys.filter((key) => new Set(state.runs.map((run) => run.config[key])).size > 1);
}

function configuration(body) {
  const rows = el("div", {});
  const draw = () => {
    remember("config", isSetOnly.checked ? "set" : "all");
    fill(rows, allKeys(search.value, isSetOnly.checked));
  };
  const search = el("input", { type: "search", placeholder: "lr, rollout ...", on: { input: debounced(draw, 120) } });
  const isSetOnly = el("input", { type: "checkbox", checked: setting("config", "set") === "set", on: { change: draw } });
  const keys = state.runs.length > 1 ? differingKeys() : [];
  fill(body,
    state.runs.length > 1 ? card("Differences", keys.length
      ? keyTable(keys)
      : el("p", { class: "quiet" }, "All settings are the same.")) : null,
    card("Settings", el("div", { class: "toolbar" }, field("Keys", search),
      el("label", { class: "toggles" }, isSetOnly, "Only those that differ from their defaults")), rows));
  draw();
}

function allKeys(text, isSetOnly) {
  const keys = [...new Set(state.runs.flatMap((run) => (isSetOnly ? run.set : Object.keys(run.config))))];
  const shown = keys.filter((key) => key.toLowerCase().includes(text.toLowerCase()));
  return shown.length ? keyTable(shown) : el("p", { class: "quiet" }, "No setting.");
}

function keyTable(keys) {
  const head = ["Key", ...state.runs.map((run) => visible(run.name))];
  return table(head, keys.map((key) =>
    [el("code", {}, visible(key)), ...state.runs.map((run) => el("code", {}, visible(run.config[key] ?? "-")))]), "keys");
}

function lineage(body) {
  fill(body, state.runs.map((run) => card(visible(run.name),
    el("ol", { class: "lineage" }, run.lineage.map(({ depth, kind, path, digest, note }) => {
      const item = el("li", {}, el("span", { class: "kind" }, kind),
        el("code", { class: "path" }, visible(path)),
        digest ? el("code", { class: "digest", title: "Digest of the recorded checksums" }, digest) : null,
        note ? el("span", { class: "quiet" }, visible(note)) : null);
      item.style.marginInlineStart = `${1.25 * depth}rem`;
      return item;
    })),
    attempts(run.attempts, run.state))));
}

function attempts(rows, runState) {
  if (!rows.length) return null;
  return el("details", { open: rows.length > 1 }, el("summary", {}, "Attempts and versions"),
    table(["Attempt", "Started", "Outcome", "Last step", "Versions"], rows.map((row) => [
      row.attempt, row.started, row.outcome ?? (row === rows[rows.length - 1] ? runState : "killed"), row.last_step ?? "-",
      Object.entries(row.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ")])));
}

export function restoreCurves() {
  state.smoothing = Number(setting("smoothing", "0")) || 0;
  state.axis = setting("axis", "step");
}
