/** Overview: curves of all runs, their configurations and differences, and their lineage. */

import { address, go, remember, route, runColor, setting, state } from "./state.js";
import { card, debounced, el, facts, field, fill, segments, table } from "./dom.js";
import { digits, duration, visible } from "./text.js";
import { curveCard } from "./charts.js";

const KEY_METRICS = ["reward/mean", "eval/pass@1", "eval/reward", "rollout/response_length",
  "train/loss", "eval/loss", "train/entropy", "train/kl", "train/grad_norm", "rollout/truncated"];
const TABS = [["curves", "Curves"], ["config", "Configuration"], ["lineage", "Lineage"]];

export function overviewPage(main) {
  const tab = route().query.get("tab") ?? "curves";
  const body = el("div", {});
  const pages = { curves, config: configuration, lineage };
  fill(main,
    el("h1", {}, state.runs.length > 1 ? "Runs" : visible(state.runs[0].name)),
    runCards(),
    segments("Part of the overview", TABS, tab, (key) => go(["overview"], { tab: key })),
    body);
  (pages[tab] ?? curves)(body);
}

function runCards() {
  return el("div", { class: "runs" }, state.runs.map((run, number) => {
    const { steps, values, seconds } = run.metrics;
    const last = run.attempts[run.attempts.length - 1] ?? {};
    const total = (seconds.step ?? []).reduce((sum, value) => sum + (value ?? 0), 0);
    const names = ["reward/mean", "eval/pass@1", "eval/loss", "train/loss"];
    const metrics = names.filter((name) => name in values).slice(0, 2);
    return el("section", { class: "card run" },
      el("h2", {}, el("i", { class: `dot run-${runColor(number)}` }), visible(run.name)),
      facts([
        ["state", outcome(last)],
        ["steps", steps.length ? `${steps[steps.length - 1]}${last.num_steps ? ` of ${last.num_steps}` : ""}` : "none"],
        ["time", total ? duration(total) : ""],
        ...metrics.map((name) => [name, digits(lastValue(values[name]))]),
        ["attempts", run.attempts.length > 1 ? run.attempts.length : ""],
      ]),
      last.error ? el("p", { class: "bad" }, visible(last.error)) : null,
      run.metrics.notes.length ? notes(run.metrics.notes) : null);
  }), differenceCard());
}

function outcome(attempt) {
  return attempt.outcome ?? (attempt.started ? "running or killed" : "unknown");
}

function lastValue(values) {
  return [...values].reverse().find((value) => value !== null) ?? null;
}

function notes(rows) {
  return el("details", {}, el("summary", {}, `Notes of ${rows.length} steps`),
    el("ul", {}, rows.slice(0, 200).map(([step, ...texts]) =>
      el("li", {}, `Step ${step}: ${visible(texts.join("; "))}`))));
}

function differenceCard() {
  if (state.runs.length < 2) return null;
  const keys = differingKeys();
  return el("section", { class: "card run" }, el("h2", {}, "Differences"),
    el("p", {}, keys.length === 1 ? "1 setting differs." : `${keys.length} settings differ.`),
    el("a", { class: "button", href: address(["overview"], { tab: "config" }) }, "Compare configurations"));
}

function curves(body) {
  const grid = el("div", {});
  const shownTitle = debounced(() => drawGrid(grid, search.value), 150);
  const search = el("input", { type: "search", placeholder: "reward, length ...",
    on: { input: shownTitle } });
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02,
    value: state.smoothing, on: { input: () => {
      state.smoothing = Number(slider.value);
      remember("smoothing", slider.value);
      level.textContent = digits(state.smoothing);
      redraw(grid);
    } } });
  const level = el("output", {}, digits(state.smoothing));
  fill(body,
    el("div", { class: "toolbar" }, field("Metrics", search),
      field("Smoothing", el("span", { class: "with-value" }, slider, level)), toggles(grid, search)),
    legend(), grid);
  drawGrid(grid, "");
}

const redraw = debounced((grid) => {
  grid.querySelectorAll(".curve").forEach((figure) => figure.redraw());
}, 40);

function toggles(grid, search) {
  if (state.runs.length < 2) return null;
  return el("div", { class: "toggles", role: "group", "aria-label": "Shown runs" },
    state.runs.map((run, number) => el("label", {},
      el("input", { type: "checkbox", checked: !state.hidden.has(number), on: { change: (event) => {
        if (event.target.checked) state.hidden.delete(number);
        else state.hidden.add(number);
        drawGrid(grid, search.value);
      } } }), el("i", { class: `dot run-${runColor(number)}` }), visible(run.name))));
}

function legend() {
  const { checkpoints, evaluations, restarts } = allMarkers();
  return el("p", { class: "quiet small" }, "Drag in a chart to zoom, double-click to reset.",
    checkpoints.length ? " Triangles at the bottom mark checkpoints." : "",
    evaluations.length ? " Circles at the top mark evaluations." : "",
    restarts.length ? " Dashed lines mark restarts." : "");
}

function allMarkers() {
  const shown = state.runs.filter((_, number) => !state.hidden.has(number));
  const steps = (kind) => [...new Set(shown.flatMap((run) => run.markers[kind]))];
  return {
    checkpoints: steps("checkpoints"),
    evaluations: steps("evaluations"),
    restarts: steps("restarts"),
  };
}

function drawGrid(grid, text) {
  const names = [...new Set(state.runs.flatMap((run) => Object.keys(run.metrics.values)))];
  const wanted = names.filter((name) => name.toLowerCase().includes(text.toLowerCase()));
  const groups = new Map();
  const key = text ? [] : KEY_METRICS.filter((name) => names.includes(name) && lines(name).length);
  if (key.length) groups.set("Key metrics", key);
  for (const name of wanted.sort()) {
    const group = name.includes("/") ? name.split("/")[0] : "other";
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  const markers = allMarkers();
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
  return state.runs
    .map((run, number) => ({ run: number, label: run.name, steps: run.metrics.steps, values: run.metrics.values[name] }))
    .filter(({ run, values }) => values?.some((value) => value !== null) && !state.hidden.has(run));
}

/** Return the keys whose values are not the same in all runs. */
export function differingKeys() {
  const keys = [...new Set(state.runs.flatMap((run) => Object.keys(run.config)))];
  return keys.filter((key) => new Set(state.runs.map((run) => run.config[key])).size > 1);
}

function configuration(body) {
  const rows = el("div", {});
  const search = el("input", { type: "search", placeholder: "lr, rollout ...",
    on: { input: debounced(() => fill(rows, allKeys(search.value)), 120) } });
  const keys = state.runs.length > 1 ? differingKeys() : [];
  fill(body,
    state.runs.length > 1 ? card("Differences", keys.length
      ? keyTable(keys)
      : el("p", { class: "quiet" }, "All settings are the same.")) : null,
    card("All settings", field("Keys", search), rows));
  fill(rows, allKeys(""));
}

function allKeys(text) {
  const keys = [...new Set(state.runs.flatMap((run) => Object.keys(run.config)))];
  return keyTable(keys.filter((key) => key.toLowerCase().includes(text.toLowerCase())));
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
    attempts(run.attempts))));
}

function attempts(rows) {
  if (!rows.length) return null;
  return el("details", { open: rows.length > 1 }, el("summary", {}, "Attempts and versions"),
    table(["Attempt", "Started", "Outcome", "Last step", "Versions"], rows.map((row) => [
      row.attempt, row.started, outcome(row), row.last_step ?? "-",
      Object.entries(row.versions ?? {}).map(([name, version]) => `${name} ${version}`).join(", ")])));
}

export function restoreSmoothing() {
  state.smoothing = Number(setting("smoothing", "0")) || 0;
}
