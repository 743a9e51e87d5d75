/** Evaluation: accuracy over time, and the problems won and lost between two checkpoints. */

import { go, route, state } from "./state.js";
import { el, field, fill, select } from "./dom.js";
import { count, digits, visible } from "./text.js";
import { stepTable } from "./data.js";
import { curveCard, metricLine } from "./charts.js";
import { virtualList } from "./list.js";

const PROBLEM_HEIGHT = 40;
const CHANGES = [["lost", "lost"], ["won", "won"], ["better", "better"], ["worse", "worse"], ["same", "same"]];

export async function evaluationPage(main) {
  const { query } = route();
  const run = Math.min(Number(query.get("run") ?? 0), state.runs.length - 1);
  const entries = state.runs[run].tables.eval;
  const steps = entries.map((entry) => entry.step);
  fill(main, el("h1", {}, "Evaluation"), el("div", { class: "toolbar" }, problemRunSelect(run)), accuracy());
  if (!steps.length) {
    main.append(el("p", { class: "quiet" }, "The run has no files of evaluations (eval.every_steps, log.save_rollouts)."));
    return;
  }
  const before = pick(query.get("before"), steps, steps[0]);
  const after = pick(query.get("after"), steps, steps[steps.length - 1]);
  const problems = await compare(run, before, after);
  main.append(...comparison(run, steps, before, after, problems, query.get("change") ?? ""));
}

function pick(text, steps, fallback) {
  return text !== null && steps.includes(Number(text)) ? Number(text) : fallback;
}

function problemRunSelect(run) {
  if (state.runs.length < 2) return null;
  return field("Run of the problems", select(state.runs.map((item, i) => [i, visible(item.name)]), run,
    (value) => go(["evaluation"], { run: value })));
}

/** Return the curves of accuracy: pass@k and mean@n of a run share a chart if there is one run. */
function accuracy() {
  const names = [...new Set(state.runs.flatMap((run) => Object.keys(run.metrics.values)))]
    .filter((name) => /^eval\/(pass@|mean@|reward$|loss$|response_length$)/.test(name)).sort();
  return el("div", { class: "grid" }, names.map((name) => curveCard(name,
    state.runs.map((_, number) => metricLine(number, name)).filter(Boolean), [])));
}

/** Return the problems of two evaluations with the numbers of right answers. */
async function compare(run, before, after) {
  const [first, second] = await Promise.all([before, after].map((step) => stepTable(run, "eval", step)));
  const old = rights(first);
  return [...rights(second)].filter(([prompt]) => old.has(prompt)).map(([prompt, now]) => {
    const then = old.get(prompt);
    return { prompt, then, now, change: changeKind(then, now) };
  });
}

function rights(table) {
  const problems = new Map();
  table.prompt.forEach((prompt, i) => {
    const problem = problems.get(prompt)
      ?? { right: 0, total: 0, group: table.group[i], text: table.prompts[table.group[i]], isJudged: false };
    problem.right += table.verdict[i] === 1 ? 1 : 0;
    problem.isJudged ||= table.verdict[i] >= 0;
    problem.total += 1;
    problems.set(prompt, problem);
  });
  return problems;
}

/** A problem is won if at least half of the answers are right only after, and lost conversely. */
function changeKind(then, now) {
  const [p, q] = [then.right / then.total, now.right / now.total];
  if (p < 0.5 && q >= 0.5) return "won";
  if (p >= 0.5 && q < 0.5) return "lost";
  if (p === q) return "same";
  return q > p ? "better" : "worse";
}

function comparison(run, steps, before, after, problems, wanted) {
  const show = (changes) => go(["evaluation"], { run, before, after, change: wanted, ...changes }, true);
  const pairs = steps.map((step) => [step, `step ${step}`]);
  const numbers = Object.fromEntries(CHANGES.map(([kind]) => [kind, problems.filter(({ change }) => change === kind).length]));
  const shown = problems.filter(({ change }) => !wanted || change === wanted);
  const list = virtualList({
    label: "Problems",
    kind: "problems",
    rowHeight: PROBLEM_HEIGHT,
    render: (index) => problemRow(shown[index]),
    describe: (index) => `Prompt ${shown[index].prompt}: ${shown[index].change}`,
    open: (index) => go(["group", run, "eval", after, shown[index].now.group]),
  });
  list.show(shown.length);
  return [
    el("h2", {}, "Problems between two evaluations"),
    el("div", { class: "toolbar" },
      field("Before", select(pairs, before, (value) => show({ before: value }))),
      field("After", select(pairs, after, (value) => show({ after: value }))),
      el("span", { class: "segments", role: "group", "aria-label": "Change" },
        [["", "all"], ...CHANGES].map(([kind, label]) => el("button", { type: "button", "aria-pressed": String(wanted === kind),
          on: { click: () => show({ change: kind }) } }, kind ? `${label} ${numbers[kind]}` : `all ${problems.length}`)))),
    el("p", { class: "quiet small" }, `${count(shown.length, "problem")}. Won: at least half of the answers are right only in the later evaluation.`),
    list.element,
  ];
}

function problemRow({ prompt, then, now, change }) {
  const share = ({ right, total, isJudged }) => (isJudged ? `${digits(right)}/${total}` : "not judged");
  return [
    el("span", { class: "cell c0" }, prompt),
    el("span", { class: `cell c2 change-${change}` }, change),
    el("span", { class: "cell c3" }, `${share(then)} \u2192 ${share(now)}`),
    el("span", { class: "cell c6" }, visible(now.text ?? "")),
  ];
}
