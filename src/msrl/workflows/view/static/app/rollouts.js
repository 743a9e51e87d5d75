/** Rollouts: a searchable list of all samples, and the samples of a group side by side. */

import { address, go, route, state } from "./state.js";
import { card, debounced, el, facts, field, fill, select } from "./dom.js";
import { VERDICTS, count, digits, highlighted, percent, searchPattern, snippet, verdictText, visible } from "./text.js";
import { details, eachTable, stepTable, tableEntry } from "./data.js";
import { virtualList } from "./list.js";
import { turnViews } from "./sample.js";
import { imageViews } from "./images.js";

const ROW_HEIGHT = 40;
const NARROW_ROW_HEIGHT = 86;
const FILTERS = ["run", "kind", "from", "to", "verdict", "finish", "tag", "trained", "rewardMin", "rewardMax",
  "lengthMin", "lengthMax", "text", "sort"];
const SORTS = [["", "step"], ["reward", "lowest reward"], ["-reward", "highest reward"],
  ["length", "shortest"], ["-length", "longest"], ["-staleness", "most stale"]];

let current = 0; // number of the latest visit, so that a slow load of an earlier one ends
let loadedSamples = { entries: null, samples: null }; // of the run and kind that were listed last
let listed = { key: "", rows: [] }; // rows of the latest list

/** Return the filters of the address, with the number of the run. */
function filtersOf(query, run = 0) {
  const filters = Object.fromEntries(FILTERS.map((name) => [name, query.get(name) ?? ""]));
  return { ...filters, run: Math.min(Number(filters.run) || run, state.runs.length - 1) };
}

export async function rolloutsPage(main) {
  const visit = ++current;
  const filters = filtersOf(route().query);
  const { run } = filters;
  const kind = filters.kind === "eval" ? "eval" : "rollout";
  const status = el("p", { class: "quiet small", role: "status" });
  const isNarrow = matchMedia("(max-width: 720px)").matches;
  let shown = [];
  let samples = new Samples();
  const list = virtualList({
    label: "Samples",
    rowHeight: isNarrow ? NARROW_ROW_HEIGHT : ROW_HEIGHT,
    render: (index) => sampleRow(samples, shown[index], run, kind, filters.text),
    describe: (index) => description(samples, shown[index]),
    open: (index) => go(["sample", run, kind, samples.step[shown[index]], samples.row[shown[index]]], { ...filters, run: "", kind: "" }),
  });
  const bar = el("div", { class: "toolbar filters" });
  const show = (rows, text, keepPosition) => {
    shown = rows;
    list.show(rows.length, keepPosition);
    status.textContent = text ?? `${count(rows.length, "sample")} of ${samples.length.toLocaleString("en-US")}`;
  };
  const search = () => {
    const searched = ++current;
    return selectRows(run, kind, samples, filters, show, () => searched === current);
  };
  const change = (name, value) => {
    filters[name] = value;
    if (name !== "text") go(["rollouts"], filters, true);
    else {
      history.replaceState(null, "", address(["rollouts"], filters)); // without drawing the field again
      search();
    }
  };
  fill(main, el("h1", {}, "Rollouts"), bar, status, header(), list.element);
  const total = state.runs[run].tables[kind].length;
  samples = await loadSamples(run, kind, (partial, files) => {
    samples = partial;
    if (files % 64 === 1 && files < total) show(sorted(samples, filtered(samples, filters), filters.sort), null, true);
  }, () => visit === current);
  if (visit !== current) return;
  fill(bar, filterBar(samples, filters, run, change));
  await search();
  if (!total) status.textContent = "The run has no files of samples (log.save_rollouts).";
}

/** Return the columns of all samples of a run; those of the latest run are kept. */
async function loadSamples(run, kind, onStep, isCurrent) {
  const entries = state.runs[run].tables[kind];
  if (loadedSamples.entries === entries) return loadedSamples.samples;
  const samples = new Samples();
  let files = 0;
  await eachTable(run, kind, (entry, table) => {
    samples.add(entry, table);
    files += 1;
    onStep(samples, files);
  }, isCurrent);
  if (files === entries.length) loadedSamples = { entries, samples };
  return samples;
}

/** Pass the rows that the filters select to `show`, those with a text as they are found. */
async function selectRows(run, kind, samples, filters, show, isCurrent) {
  const rows = sorted(samples, filtered(samples, filters), filters.sort);
  const finish = (shown, text) => {
    listed = { key: JSON.stringify([run, kind, filters]), rows: shown };
    show(shown, text);
  };
  if (!filters.text) finish(rows);
  else if (state.search) {
    const { seconds, hits } = await state.search(run, kind, filters.text);
    if (!isCurrent()) return;
    const found = new Set(hits.map(([step, row]) => `${step}/${row}`));
    const shown = rows.filter((i) => found.has(`${samples.step[i]}/${samples.row[i]}`));
    finish(shown, `${count(shown.length, "sample")} with this text (${digits(seconds)} s)`);
  } else {
    await searchTexts(run, kind, samples, rows, filters, isCurrent, finish);
  }
}

/** Return the samples before and after one in the list that the filters of the address select. */
export async function neighbors(run, kind, step, row, total) {
  const filters = filtersOf(route().query, run);
  if (FILTERS.every((name) => name === "run" || !filters[name])) {
    return [row - 1, row + 1].map((other) => (other >= 0 && other < total ? [step, other] : null));
  }
  filters.run = run;
  if (kind === "eval") filters.kind = kind;
  const samples = await loadSamples(run, kind, () => {}, () => true);
  if (listed.key !== JSON.stringify([run, kind, filters])) {
    await selectRows(run, kind, samples, filters, () => {}, () => true);
  }
  const at = listed.rows.findIndex((i) => samples.step[i] === step && samples.row[i] === row);
  return [at - 1, at + 1].map((other) => (at >= 0 && other in listed.rows
    ? [samples.step[listed.rows[other]], samples.row[listed.rows[other]]] : null));
}

/** Columns of all samples of a run. */
class Samples {
  constructor() {
    this.length = 0;
    this.names = ["group", "sample", "prompt", "reward", "finish", "tag", "trained", "verdict", "staleness", "preview"];
    for (const name of [...this.names, "tokens", "step", "row", "question"]) this[name] = [];
  }

  add(entry, table) {
    for (const name of this.names) for (const value of table[name]) this[name].push(value);
    for (let row = 0; row < entry.count; row += 1) {
      this.tokens.push(table.length[row]);
      this.step.push(entry.step);
      this.row.push(row);
      this.question.push(table.prompts[table.group[row]]);
    }
    this.length += entry.count;
  }
}

function filtered(samples, filters) {
  const bound = (text, missing) => (text === "" ? missing : Number(text));
  const [from, to] = [bound(filters.from, -Infinity), bound(filters.to, Infinity)];
  const [rewardMin, rewardMax] = [bound(filters.rewardMin, -Infinity), bound(filters.rewardMax, Infinity)];
  const [lengthMin, lengthMax] = [bound(filters.lengthMin, -Infinity), bound(filters.lengthMax, Infinity)];
  const rows = [];
  for (let i = 0; i < samples.length; i += 1) {
    if (samples.step[i] < from || samples.step[i] > to) continue;
    if (samples.reward[i] < rewardMin || samples.reward[i] > rewardMax) continue;
    if (samples.tokens[i] < lengthMin || samples.tokens[i] > lengthMax) continue;
    if (filters.verdict !== "" && String(samples.verdict[i]) !== filters.verdict) continue;
    if (filters.finish !== "" && samples.finish[i] !== filters.finish) continue;
    if (filters.tag !== "" && samples.tag[i] !== filters.tag) continue;
    if (filters.trained !== "" && String(samples.trained[i]) !== filters.trained) continue;
    rows.push(i);
  }
  return rows;
}

function sorted(samples, rows, order) {
  if (!order) return rows;
  const sign = order.startsWith("-") ? -1 : 1;
  const name = order.replace("-", "");
  const column = name === "length" ? samples.tokens : samples[name];
  return rows.sort((a, b) => sign * (column[a] - column[b]));
}

/** Find the rows whose texts contain the searched one; the files of texts load one by one. */
async function searchTexts(run, kind, samples, candidates, filters, isCurrent, show) {
  const pattern = searchPattern(filters.text, "iu");
  const byStep = new Map();
  for (const i of candidates) {
    if (!byStep.has(samples.step[i])) byStep.set(samples.step[i], []);
    byStep.get(samples.step[i]).push(i);
  }
  const matches = new Set();
  let searched = 0;
  for (const [step, rows] of byStep) {
    for (const i of rows) {
      const sample = await details(run, kind, step, samples.row[i]);
      if (!isCurrent()) return;
      if (contains(sample, pattern)) matches.add(i);
    }
    searched += 1;
    show(candidates.filter((i) => matches.has(i)),
      `${count(matches.size, "sample")} with this text (searched ${searched} of ${byStep.size} steps)`, searched > 1);
  }
  if (!byStep.size) show([]);
}

function contains(sample, pattern) {
  return sample.turns.some(([, text]) => pattern.test(text)) || pattern.test(sample.answer);
}

function filterBar(samples, filters, run, change) {
  const values = (column) => [...new Set(column)].filter((value) => value !== "").sort();
  const choice = (label, name, pairs) => field(label, select([["", "all"], ...pairs], filters[name], (value) => change(name, value)));
  const numbers = (label, low, high) => el("div", { class: "field pair", role: "group", "aria-label": label },
    el("span", {}, label), el("span", {}, bound(low, `lowest ${label}`), " to ", bound(high, `highest ${label}`)));
  const bound = (name, label) => el("input", { type: "number", step: "any", value: filters[name], "aria-label": label,
    on: { change: (event) => change(name, event.target.value) } });
  const tags = values(samples.tag);
  const kinds = [["rollout", "rollouts"], ["eval", "evaluations"]].filter(([kind]) => state.runs[run].tables[kind].length);
  const text = el("input", { type: "search", value: filters.text, placeholder: "in prompts, responses, answers",
    on: { input: debounced(() => change("text", text.value), 200) } });
  const more = ["kind", "finish", "tag", "trained", "from", "to", "rewardMin", "rewardMax", "lengthMin", "lengthMax", "sort"];
  const isOpen = matchMedia("(min-width: 721px)").matches || more.some((name) => filters[name] !== "");
  return [
    state.runs.length > 1 ? field("Run", select(state.runs.map((item, i) => [i, visible(item.name)]), run, (value) => change("run", value))) : null,
    el("div", { class: "field segments-field" }, el("span", {}, "Verdict"), verdictButtons(samples, filters, change)),
    field("Text", text, "wide"),
    el("details", { class: "more", open: isOpen }, el("summary", {}, "More filters"), el("div", { class: "toolbar" },
    kinds.length > 1 ? field("Kind", select(kinds, filters.kind || "rollout", (value) => change("kind", value))) : null,
    choice("Finish", "finish", values(samples.finish).map((reason) => [reason, reason])),
    tags.length ? choice("Tag", "tag", tags.map((tag) => [tag, visible(tag)])) : null,
    choice("Trained", "trained", [["1", "trained"], ["0", "not trained"]]),
    numbers("Steps", "from", "to"), numbers("Reward", "rewardMin", "rewardMax"), numbers("Length", "lengthMin", "lengthMax"),
    field("Order", select(SORTS, filters.sort, (value) => change("sort", value))))),
  ];
}

function verdictButtons(samples, filters, change) {
  const numbers = { 1: 0, 0: 0, "-1": 0 };
  for (const verdict of samples.verdict) numbers[verdict] += 1;
  const keys = ["", ...["1", "0", "-1"].filter((verdict) => numbers[verdict])];
  return el("span", { class: "segments", role: "group", "aria-label": "Verdict" }, keys.map((verdict) =>
    el("button", { type: "button", "aria-pressed": String(filters.verdict === verdict),
      on: { click: () => change("verdict", verdict) } },
    verdict === "" ? "all" : `${VERDICTS[verdict]} ${numbers[verdict].toLocaleString("en-US")}`)));
}

function header() {
  return el("div", { class: "row head", "aria-hidden": "true" },
    ["step", "prompt", "verdict", "reward", "tokens", "finish", "question and response"].map((name, i) =>
      el("span", { class: `cell c${i}` }, name)));
}

function sampleRow(samples, i, run, kind, text) {
  const verdict = samples.verdict[i];
  return [
    el("span", { class: "cell c0" }, samples.step[i]),
    el("span", { class: "cell c1" }, `${samples.prompt[i]}.${samples.sample[i]}`),
    el("span", { class: `cell c2 verdict-${verdict}` }, verdictText(verdict)),
    el("span", { class: "cell c3" }, digits(samples.reward[i])),
    el("span", { class: "cell c4" }, samples.tokens[i]),
    el("span", { class: "cell c5" }, samples.finish[i], samples.trained[i] ? "" : " · not trained"),
    preview(samples, i, run, kind, text),
  ];
}

/** Return the beginning of a sample, or its first hit of a search. */
function preview(samples, i, run, kind, text) {
  const cell = el("span", { class: "cell c6" },
    el("span", { class: "quiet" }, highlighted(samples.question[i] ?? "", text)), " ", el("span", {}, highlighted(samples.preview[i], text)));
  if (text && !cell.querySelector("mark")) {
    details(run, kind, samples.step[i], samples.row[i]).then(({ turns, answer }) => {
      const hit = [...turns, ["ground truth", answer]].find(([, content]) => searchPattern(text, "iu").test(content));
      if (hit) fill(cell, el("span", { class: "quiet" }, `${visible(hit[0])}: `), highlighted(snippet(hit[1], text), text));
    });
  }
  return cell;
}

function description(samples, i) {
  return `Step ${samples.step[i]}, prompt ${samples.prompt[i]}, sample ${samples.sample[i]}, ${VERDICTS[samples.verdict[i]]}, `
    + `reward ${digits(samples.reward[i])}, ${samples.tokens[i]} tokens`;
}

/** Show the samples of a group side by side. */
export async function groupPage(main, words) {
  const [run, kind, step, group] = [Number(words[1]), words[2], Number(words[3]), Number(words[4])];
  const entry = tableEntry(run, kind, step);
  if (!entry) throw new Error(`The run has no ${kind} of step ${step}.`);
  const table = await stepTable(run, kind, step);
  const rows = table.group.map((number, i) => (number === group ? i : -1)).filter((i) => i >= 0);
  const samples = await Promise.all(rows.map((row) => details(run, kind, step, row)));
  const rights = rows.filter((row) => table.verdict[row] === 1).length;
  const judged = rows.some((row) => table.verdict[row] >= 0);
  fill(main,
    el("nav", { class: "crumbs", "aria-label": "Position" },
      el("a", { href: address(["rollouts"], { run, kind: kind === "eval" ? "eval" : "" }) }, "Rollouts"), " / ",
      el("a", { href: address(["rollouts"], { run, kind: kind === "eval" ? "eval" : "", from: step, to: step }) }, `step ${step}`)),
    el("h1", {}, `Prompt ${table.prompt[rows[0]]}`),
    facts([["samples", rows.length], ["right", judged ? `${rights} (${percent(rights / rows.length)})` : ""],
      ["ground truth", visible(samples[0]?.answer ?? "")], ["tag", visible(table.tag[rows[0]])]]),
    card("Prompt", imageViews(samples[0]?.images, run), el("pre", { class: "text", tabindex: "0" }, visible(samples[0]?.turns[0]?.[1] ?? ""))),
    el("div", { class: "side-by-side", tabindex: "0", role: "region", "aria-label": "Samples side by side" },
      samples.map((sample, i) => groupColumn(run, kind, step, table, rows[i], sample))));
}

function groupColumn(run, kind, step, table, row, sample) {
  return el("section", { class: "card" },
    el("h2", {}, el("a", { href: address(["sample", run, kind, step, row]) }, `Sample ${table.sample[row]}`)),
    el("p", {}, el("span", { class: `verdict-${table.verdict[row]}` }, verdictText(table.verdict[row])),
      ` · reward ${digits(table.reward[row])} · ${count(table.length[row], "token")} · ${table.finish[row]}`),
    turnViews(sample.turns.slice(1)));
}
