/** Sample: the turns, scores and reasons of a response, and the values of each token. */

import { address, go, remember, route, setting, state } from "./state.js";
import { card, el, facts, field, fill, segments, select, table } from "./dom.js";
import { count, digits, highlighted, verdictText, visible } from "./text.js";
import { chunk, details, stepTable, tableEntry } from "./data.js";
import { imageAt, imageBlock, imageViews } from "./images.js";
import { neighbors } from "./rollouts.js";

const MAX_TOKENS = 20000; // elements on the page; the rest is shown on request
const LEVELS = 8; // token colors per direction in style.css
// Calls in the formats of environments/tool_formats/.
const TOOL_CALLS = new RegExp(`(${[
  "<tool_call>[^]*?(?:</tool_call>|(?=<tool_call>)|$)",
  "<\uff5ctool\u2581calls\u2581begin\uff5c>[^]*?(?:<\uff5ctool\u2581calls\u2581end\uff5c>|$)",
  "\\[TOOL_CALLS\\][^]*",
  "<\\|(?:python_tag|tool_call)\\|>[^]*",
  "<minimax:tool_call>[^]*?(?:</minimax:tool_call>|$)",
  "<\\|tool_calls_section_begin\\|>[^]*?(?:<\\|tool_calls_section_end\\|>|$)",
  "^\\s*\\[[A-Za-z_][\\w.]*\\([^]*\\)\\]\\s*$",
  "(?:<\\|channel\\|>commentary|<\\|start\\|>assistant) to=[^]*?(?:<\\|call\\|>|$)",
].join("|")})`);

/**
 * Values by which tokens are colored. `value(sample, i)` is the value of the token i after the
 * first sampled one, and `top` the value with the strongest color (null: the largest value).
 */
const COLORINGS = {
  advantage: { label: "Advantage", value: (s, i) => at(s.advantages, i), isSigned: true, top: null },
  ratio: { label: "Log-ratio of policy and behavior", value: logRatio, isSigned: true, top: null, needs: "trainer" },
  kl: { label: "KL to the reference", value: divergence, isSigned: false, top: null, needs: "reference" },
  entropy: { label: "Entropy", value: (s, i) => at(s.values.entropy, i), isSigned: false, top: null, needs: "entropy" },
  surprise: { label: "Surprise (-log-probability)", value: surprise, isSigned: false, top: 5 },
  mask: { label: "Loss mask", value: (s, i) => at(s.mask, i), isSigned: false, top: 1 },
  version: { label: "Policy version", value: versionAt, isSigned: false, isNominal: true, top: null },
};

function at(values, i) {
  if (values === undefined || values === null) return null;
  const value = typeof values === "object" ? values[i] : values;
  return Number.isNaN(value) ? null : value;
}

function logRatio(sample, i) {
  const [policy, behavior] = [at(sample.values.trainer, i), at(sample.values.behavior, i)];
  return policy === null || behavior === null ? null : policy - behavior;
}

/** Return the estimate k3 of the KL divergence of a token: r - log r - 1 with r = p_ref / p. */
function divergence(sample, i) {
  const reference = at(sample.values.reference, i);
  const policy = at(sample.values.trainer ?? sample.values.behavior, i);
  if (reference === null || policy === null) return null;
  return Math.exp(reference - policy) - (reference - policy) - 1;
}

function surprise(sample, i) {
  const logprob = at(sample.values.behavior, i);
  return logprob === null ? null : -logprob;
}

function versionAt(sample, i) {
  sample.tokenVersions ??= tokenVersions(sample);
  return sample.tokenVersions[i];
}

/** Return the version of each token after the first sampled one; that of a text is the next one. */
function tokenVersions(sample) {
  const versions = [];
  let [run, used] = [0, 0];
  for (let i = 0; i < sample.ids.length - sample.first; i += 1) {
    while (run < sample.versions.length - 1 && used >= sample.versions[run][1]) [run, used] = [run + 1, 0];
    versions.push(sample.versions.length ? sample.versions[run][0] : null);
    used += at(sample.sampled, i) ? 1 : 0;
  }
  return versions;
}

export async function samplePage(main, words) {
  const [run, kind, step, row] = [Number(words[1]), words[2], Number(words[3]), Number(words[4])];
  const entry = tableEntry(run, kind, step);
  if (!entry) throw new Error(`The run has no ${kind} of step ${step}.`);
  const [sample, columns] = await Promise.all([details(run, kind, step, row), stepTable(run, kind, step)]);
  const { query } = route();
  const view = query.get("view") ?? setting("sample.view", "text");
  const body = el("div", {});
  const show = (key) => {
    remember("sample.view", key);
    if (key === "tokens") tokensView(body, sample.sequences, run);
    else fill(body, imageViews(sample.images, run), turnViews(sample.turns, query.get("text")));
  };
  fill(main,
    crumbs(run, kind, step, columns, row, entry.count),
    el("h1", {}, `Sample ${columns.sample[row]} of prompt ${columns.prompt[row]}`),
    el("div", { class: "columns" }, scores(sample, columns, row), about(sample, columns, row)),
    segments("View of the response", [["text", "Text"], ["tokens", "Tokens"]], view, show),
    body);
  show(view);
  body.querySelector("mark")?.scrollIntoView({ block: "center" });
}

function crumbs(run, kind, step, columns, row, total) {
  const filters = Object.fromEntries(route().query);
  delete filters.view;
  const query = { ...filters, run, kind: kind === "eval" ? "eval" : "" };
  const end = el("span", { class: "end" });
  const link = (text, label, key, target) => (target && el("a", { href: address(["sample", run, kind, ...target], filters),
    "aria-label": label, data: { key } }, text));
  neighbors(run, kind, step, row, total).then(([before, after]) => fill(end,
    link("\u2190 previous", "Previous sample", "p", before), link("next \u2192", "Next sample", "n", after)));
  return el("nav", { class: "crumbs", "aria-label": "Position" },
    el("a", { href: address(["rollouts"], query) }, "Rollouts"), " / ",
    el("a", { href: address(["rollouts"], { run, kind: query.kind, from: step, to: step }) }, `step ${step}`), " / ",
    el("a", { href: address(["group", run, kind, step, columns.group[row]]) }, `group of prompt ${columns.prompt[row]}`), end);
}

function scores(sample, columns, row) {
  const verdict = columns.verdict[row];
  const rows = Object.entries(sample.scores).map(([name, score]) =>
    [visible(name), digits(score), visible(sample.reasons[name] ?? "")]);
  return card("Why this reward",
    el("p", { class: "verdict" }, el("strong", { class: `verdict-${verdict}` }, verdictText(verdict)),
      ` · reward ${digits(columns.reward[row])}`),
    rows.length ? table(["Source", "Score", "Reason"], rows, "reasons") : null,
    sample.answer ? el("p", {}, "Ground truth: ", el("code", {}, visible(sample.answer))) : null);
}

function about(sample, columns, row) {
  const values = sample.sequences.flatMap(({ advantages }) => (typeof advantages === "number" ? advantages : Array.from(advantages ?? [])));
  const [lowest, highest] = values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)],
    [Infinity, -Infinity]);
  const several = lowest < highest ? `${digits(lowest)} to ${digits(highest)}` : digits(lowest);
  const advantages = values.length ? several : "-";
  const versions = sample.sequences.flatMap((sequence) => sequence.versions);
  return card("About this sample", facts([
    ["tokens", count(columns.length[row], "token")], ["finish", columns.finish[row]],
    ["advantage", advantages], ["trained", columns.trained[row] ? "yes" : "no"],
    ["versions", versions.map(([version, tokens]) => `${version} (${tokens})`).join(", ")],
    ["staleness", columns.staleness[row]], ["tag", visible(columns.tag[row])]]));
}

/** Return the turns of a conversation; those of tools are folded. */
export function turnViews(turns, wanted = "") {
  return turns.map(([role, text]) => {
    const parts = toolCalls(text, wanted);
    const hasHit = parts.flat().some((part) => part instanceof Element && part.matches("mark, [open]"));
    const isFolded = role === "tool" || role === "prompt" || role === "system";
    return el("details", { class: `turn ${role === "tool" ? "tool" : ""}`, open: !isFolded || turns.length < 3 || hasHit },
      el("summary", {}, el("span", { class: "role" }, visible(role)),
        el("span", { class: "quiet" }, ` ${count([...text].length, "character")}`)),
      el("div", { class: "text" }, parts));
  });
}

/** Return a text as nodes, with the calls of tools folded. The last call may lack its end. */
function toolCalls(text, wanted) {
  return text.split(TOOL_CALLS).map((part, i) => {
    const shown = highlighted(part, wanted);
    if (i % 2 === 0) return shown; // the parts between are the matches
    return el("details", { class: "call", open: Array.isArray(shown) && shown.length > 1 }, el("summary", {}, "tool call"), el("pre", {}, shown));
  });
}

/** Show the tokens of a sequence. An episode whose history was edited has several. */
function tokensView(body, sequences, run) {
  if (sequences.length === 1) {
    drawTokens(body, sequences[0], run);
    return;
  }
  const tokens = el("div", {});
  const names = sequences.map((_, i) => [i, `${i + 1} of ${sequences.length}`]);
  fill(body, field("Sequence", select(names, 0, (value) => drawTokens(tokens, sequences[Number(value)], run))), tokens);
  drawTokens(tokens, sequences[0], run);
}

async function drawTokens(body, sample, run) {
  fill(body, el("p", { class: "quiet" }, "Loading the tokens ..."));
  const pieces = await chunk(`${run}/pieces`);
  const names = Object.keys(COLORINGS).filter((name) => {
    const needs = COLORINGS[name].needs;
    return !needs || sample.values[needs] !== undefined;
  });
  const missing = Object.values(COLORINGS).filter(({ needs }) => needs && sample.values[needs] === undefined);
  const wanted = setting("sample.color", "advantage");
  let name = names.includes(wanted) ? wanted : "advantage";
  const readout = el("div", { class: "token-readout", "aria-live": "polite" });
  const area = el("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens: move with the arrow keys" });
  const key = el("p", { class: "key" });
  const draw = () => {
    const scale = tokenScale(sample, COLORINGS[name]);
    fill(key, scaleKey(COLORINGS[name], scale));
    drawSpans(area, sample, pieces, COLORINGS[name], scale);
  };
  fill(body, el("div", { class: "toolbar" },
    field("Color", select(names.map((item) => [item, COLORINGS[item].label]), name, (value) => {
      name = value;
      remember("sample.color", value);
      draw();
    })), key),
  state.runs[run].hasPieces ? null : el("p", { class: "quiet" }, "No tokenizer of this run was found, so tokens are shown as ids."),
  readout, area,
  missing.length ? el("p", { class: "quiet small" }, `Not recorded for this sample: ${missing.map(({ label }) => label).join(", ")}. `,
    "Set log.rollouts: parquet and log.tokens: sampled or all.") : null);
  draw();
  explore(area, readout, sample, pieces);
}

/** Return the value with the strongest color. */
function tokenScale(sample, coloring) {
  if (coloring.top !== null) return coloring.top;
  let top = 0;
  for (let i = 0; i < sample.ids.length - sample.first; i += 1) {
    top = Math.max(top, Math.abs(coloring.value(sample, i) ?? 0));
  }
  return top || 1;
}

function scaleKey(coloring, scale) {
  if (coloring.isNominal) return "Each version has a color.";
  const sample = (level, text) => el("span", {}, el("i", { class: `swatch ${level}` }), text);
  return [coloring.isSigned ? sample(`low-${LEVELS}`, digits(-scale)) : null, sample("", "0"), sample(`high-${LEVELS}`, digits(scale))];
}

function drawSpans(area, sample, pieces, coloring, scale, limit = MAX_TOKENS) {
  const shown = Math.min(sample.ids.length, limit);
  const texts = tokenTexts(sample.ids.slice(0, shown), pieces);
  const spans = texts.map((text, i) => {
    const image = imageAt(sample, i);
    if (image) return i === image[0] ? imageBlock(image) : null;
    return el("span", { class: `tk ${tokenClass(sample, i, coloring, scale)}`, data: { i } }, text);
  });
  fill(area, spans);
  if (shown < sample.ids.length) {
    area.append(el("button", { type: "button", on: { click: () => drawSpans(area, sample, pieces, coloring, scale, Infinity) } },
      `Show all ${sample.ids.length.toLocaleString("en-US")} tokens`));
  }
}

function tokenClass(sample, i, coloring, scale) {
  const position = i - sample.first;
  if (position < 0) return "prompt";
  if (!at(sample.sampled, position)) return "prompt";
  const value = coloring.value(sample, position);
  if (value === null || value === undefined) return "";
  if (coloring.isNominal) return `nominal-${value % 6}`;
  const level = Math.min(LEVELS, Math.round((Math.abs(value) / scale) * LEVELS));
  if (!level) return "";
  return value < 0 ? `low-${level}` : `high-${level}`;
}

/** Return the texts of tokens. Bytes of a character that several tokens share go to the first. */
function tokenTexts(ids, pieces) {
  const texts = ids.map((id) => {
    const piece = pieces[id];
    return piece === undefined ? `[${id}]` : piece;
  });
  const decoder = new TextDecoder("utf-8", { fatal: true });
  for (let start = 0; start < texts.length; start += 1) {
    if (typeof texts[start] === "string") continue;
    const bytes = [];
    let end = start;
    let text = null;
    while (text === null && end < texts.length && Array.isArray(texts[end]) && bytes.length < 12) {
      bytes.push(...texts[end]);
      end += 1;
      try {
        text = decoder.decode(new Uint8Array(bytes));
      } catch {
        // The character continues in the next token.
      }
    }
    if (text === null) {
      texts[start] = texts[start].map((byte) => `\\x${byte.toString(16).padStart(2, "0")}`).join("");
    } else {
      texts[start] = text;
      for (let i = start + 1; i < end; i += 1) texts[i] = "\u00b7";
      start = end - 1;
    }
  }
  return texts.map((text) => visible(text).replace(/\n/g, "\u21b5\n"));
}

/** Show the numbers of the token under the pointer or chosen with the arrow keys. */
function explore(area, readout, sample, pieces) {
  let chosen = sample.first;
  const show = (i) => {
    area.querySelector(".chosen")?.classList.remove("chosen");
    const span = area.querySelector(`[data-i="${i}"]`);
    if (!span) return;
    chosen = i;
    span.classList.add("chosen");
    fill(readout, tokenFacts(sample, i, span.textContent));
  };
  area.addEventListener("pointerover", (event) => {
    const i = event.target.dataset?.i;
    if (i !== undefined) show(Number(i));
  });
  area.addEventListener("click", (event) => {
    const i = event.target.dataset?.i;
    if (i !== undefined) show(Number(i));
  });
  area.addEventListener("keydown", (event) => {
    const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 };
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(Math.max(0, Math.min(sample.ids.length - 1, outsideImage(sample, chosen, moves[event.key]))));
    area.querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
  });
  show(Math.min(chosen, sample.ids.length - 1));
}

/** Return the token after a move, which passes an image as one block. */
function outsideImage(sample, chosen, move) {
  const [from, to] = [imageAt(sample, chosen), imageAt(sample, chosen + move)];
  if (!to) return chosen + move;
  return to === from && move > 0 ? to[0] + to[1] : to[0];
}

function tokenFacts(sample, i, text) {
  const position = i - sample.first;
  const isSampled = position >= 0 && Boolean(at(sample.sampled, position));
  const values = isSampled ? [
    ["behavior log-prob.", digits(at(sample.values.behavior, position))],
    ["probability", digits(Math.exp(at(sample.values.behavior, position) ?? NaN))],
    ["trainer log-prob.", optional(at(sample.values.trainer, position))],
    ["log-ratio", optional(logRatio(sample, position))],
    ["reference log-prob.", optional(at(sample.values.reference, position))],
    ["KL", optional(divergence(sample, position))],
    ["entropy", optional(at(sample.values.entropy, position))],
    ["advantage", digits(at(sample.advantages, position))],
    ["trained", at(sample.mask, position) ? "yes" : "no"],
    ["version", versionAt(sample, position)],
  ] : [["", position < 0 ? "prompt" : "not sampled by the policy"]];
  return facts([["token", el("code", {}, text)], ["position", i], ["id", sample.ids[i]], ...values]);
}

function optional(value) {
  return value === null || value === undefined ? "" : digits(value);
}
