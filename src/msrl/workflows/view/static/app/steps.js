/** Steps: rewards, lengths, groups, staleness and the timeline of one step. */

import { address, go, route, state } from "./state.js";
import { card, el, facts, field, fill, select, table } from "./dom.js";
import { count, digits, duration, mean, percent, visible } from "./text.js";
import { stepTable, tableEntry } from "./data.js";
import { histogram } from "./charts.js";

// Stages during which the engines generate, and during which the training ranks compute.
const ENGINE_STAGES = new Set(["rollout", "eval"]);
const TRAINER_STAGES = new Set(["logprobs", "values", "critic", "update"]);
const TIMELINE_STEPS = 12;

export function stepsPage(main) {
  const { query } = route();
  const run = Math.min(Number(query.get("run") ?? 0), state.runs.length - 1);
  const steps = state.runs[run].metrics.steps;
  if (!steps.length) {
    fill(main, el("h1", {}, "Steps"), stepRunSelect(run), el("p", { class: "quiet" }, "The run has no step yet."));
    return;
  }
  const wanted = Number(query.get("step") ?? steps[steps.length - 1]);
  const step = steps.includes(wanted) ? wanted : steps[steps.length - 1];
  const body = el("div", { class: "columns" });
  fill(main, el("h1", {}, `Step ${step}`), stepBar(run, steps, step), body);
  drawStep(body, run, step);
}

function stepRunSelect(run) {
  if (state.runs.length < 2) return null;
  return field("Run", select(state.runs.map((item, i) => [i, visible(item.name)]), run,
    (value) => go(["steps"], { run: value })));
}

function stepBar(run, steps, step) {
  const index = steps.indexOf(step);
  const show = (i) => go(["steps"], { run, step: steps[Math.max(0, Math.min(steps.length - 1, i))] }, true);
  const slider = el("input", { type: "range", min: 0, max: steps.length - 1, value: index,
    "aria-valuetext": `step ${step}`, on: { change: () => show(Number(slider.value)) } });
  const button = (text, label, key, target, isOff) => el("button", { type: "button", "aria-label": label, data: { key },
    disabled: isOff, on: { click: () => show(target) } }, text);
  return el("div", { class: "toolbar" }, stepRunSelect(run),
    button("\u2190", "Previous step", "p", index - 1, index === 0),
    field("Step", slider, "wide"),
    button("\u2192", "Next step", "n", index + 1, index === steps.length - 1),
    tableEntry(run, "rollout", step)
      ? el("a", { class: "button", href: address(["rollouts"], { run, from: step, to: step }) }, "Rollouts of this step")
      : null);
}

async function drawStep(body, run, step) {
  const metrics = state.runs[run].metrics;
  const index = metrics.steps.indexOf(step);
  const entry = tableEntry(run, "rollout", step);
  const parts = [];
  if (entry) {
    const data = await stepTable(run, "rollout", step);
    parts.push(rewards(data), lengths(data), groups(data), staleness(data));
  }
  parts.push(allMetrics(metrics, index), timeline(run, index));
  fill(body, parts);
}

function byVerdict(data, values) {
  const kinds = [[1, "right", "good"], [0, "wrong", "bad"], [-1, "not judged", "plain"]];
  return kinds
    .map(([verdict, name, kind]) => ({ name, kind, values: values.filter((_, i) => data.verdict[i] === verdict) }))
    .filter((part) => part.values.length);
}

function key(parts) {
  return el("p", { class: "key" }, parts.map(({ name, kind, values }) =>
    el("span", {}, el("i", { class: `dot bar-${kind}` }), `${name} ${values.length}`)));
}

function rewards(data) {
  const parts = byVerdict(data, data.reward);
  const rows = Object.entries(data.scores).map(([name, scores]) => {
    const known = scores.filter((score) => score !== null);
    return [visible(name), digits(mean(known)), known.length ? digits(Math.min(...known)) : "-",
      known.length ? digits(Math.max(...known)) : "-", known.length];
  });
  return card("Rewards", histogram("Rewards", parts), key(parts),
    rows.length ? table(["Source", "Mean", "Lowest", "Highest", "Scores"], rows) : null);
}

function lengths(data) {
  const parts = byVerdict(data, data.length);
  const truncated = data.finish.filter((reason) => reason === "length").length;
  return card("Response lengths in tokens", histogram("Lengths", parts), key(parts),
    facts([["mean", digits(mean(data.length))], ["longest", digits(Math.max(...data.length))],
      ["truncated", percent(truncated / data.length.length)]]));
}

function groups(data) {
  const byGroup = new Map();
  data.group.forEach((group, i) => byGroup.set(group, [...(byGroup.get(group) ?? []), i]));
  let [equal, dropped, right, wrong] = [0, 0, 0, 0];
  for (const rows of byGroup.values()) {
    if (rows.every((i) => data.reward[i] === data.reward[rows[0]])) equal += 1;
    if (rows.every((i) => !data.trained[i])) dropped += 1;
    if (rows.every((i) => data.verdict[i] === 1)) right += 1;
    if (rows.every((i) => data.verdict[i] === 0)) wrong += 1;
  }
  const share = (number) => `${number} (${percent(number / byGroup.size)})`;
  return card("Groups", facts([["prompts", byGroup.size], ["samples", data.group.length],
    ["not trained on", share(dropped)], ["equal rewards", share(equal)],
    ["all right", share(right)], ["all wrong", share(wrong)]]));
}

function staleness(data) {
  const highest = Math.max(...data.staleness);
  if (highest <= 0) return null;
  const rows = [];
  for (let age = 0; age <= highest; age += 1) {
    const number = data.staleness.filter((value) => value === age).length;
    rows.push([count(age, "version"), number, percent(number / data.staleness.length)]);
  }
  return card("Staleness", table(["Behind by", "Samples", "Share"], rows));
}

/** Return the stages of the last steps, as busy times of engines and training ranks. */
function timeline(run, index) {
  const { steps, seconds, values } = state.runs[run].metrics;
  const names = Object.keys(seconds).filter((name) => name !== "step");
  if (!names.length) return null;
  const first = Math.max(0, index - TIMELINE_STEPS + 1);
  const idle = values["perf/engine_idle"];
  const totals = steps.map((_, i) => names.reduce((sum, name) => sum + (seconds[name][i] ?? 0), 0));
  const longest = Math.max(...totals.slice(first, index + 1)) || 1;
  const rows = [];
  for (let i = first; i <= index; i += 1) {
    rows.push([steps[i], lane(names, seconds, i, longest), digits(totals[i]),
      percent(busy(names, seconds, i, ENGINE_STAGES, totals[i], idle?.[i])),
      percent(busy(names, seconds, i, TRAINER_STAGES, totals[i]))]);
  }
  return el("section", { class: "card wide" }, el("h2", {}, "Timeline"),
    el("p", { class: "key" }, names.map((name) =>
      el("span", {}, el("i", { class: `dot ${stageClass(name)}` }), `${name} ${duration(seconds[name][index] ?? 0)}`))),
    table(["Step", "Stages", "Seconds", "Engines busy", "Trainers busy"], rows, "timeline"));
}

function busy(names, seconds, i, stages, total, idle) {
  if (idle !== undefined && idle !== null) return 1 - idle;
  return names.reduce((sum, name) => sum + (stages.has(name) ? seconds[name][i] ?? 0 : 0), 0) / (total || 1);
}

function stageClass(name) {
  const known = ["rollout", "reward", "weights", "logprobs", "update", "eval", "values", "critic", "save"];
  return `stage-${known.includes(name) ? name : "other"}`;
}

function lane(names, seconds, i, longest) {
  const parts = names.map((name) => {
    const part = el("span", { class: stageClass(name), title: `${name}: ${duration(seconds[name][i] ?? 0)}` });
    part.style.width = `${(100 * (seconds[name][i] ?? 0)) / longest}%`;
    return part;
  });
  return el("div", { class: "lane" }, parts);
}

function allMetrics(metrics, index) {
  const rows = Object.entries(metrics.values)
    .filter(([, values]) => values[index] !== null)
    .map(([name, values]) => el("div", {}, el("dt", {}, visible(name)),
      el("dd", {}, digits(values[index]), el("span", { class: "quiet" }, ` ${change(values, index)}`))));
  return el("section", { class: "card wide" }, el("h2", {}, "All metrics"),
    el("p", { class: "quiet small" }, "In gray: the change since the step before."),
    el("dl", { class: "metrics" }, rows));
}

function change(values, index) {
  const before = values[index - 1];
  if (before === null || before === undefined) return "";
  const difference = values[index] - before;
  if (difference === 0) return "";
  return `${difference > 0 ? "+" : ""}${digits(difference)}`;
}
