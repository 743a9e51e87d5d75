/** Navigation between the pages. */

import { address, options, remember, route, setting, state } from "./state.js";
import { el, facts, fill } from "./dom.js";
import { visible } from "./text.js";
import { chunk, watch } from "./data.js";
import { overviewPage, restoreCurves } from "./overview.js";
import { hideOldRuns } from "./runs.js";
import { stepsPage } from "./steps.js";
import { groupPage, rolloutsPage } from "./rollouts.js";
import { samplePage } from "./sample.js";
import { evaluationPage } from "./evaluation.js";

const PAGES = { overview: overviewPage, steps: stepsPage, rollouts: rolloutsPage, group: groupPage,
  sample: samplePage, evaluation: evaluationPage };
const LINKS = [["overview", "Overview"], ["steps", "Steps"], ["rollouts", "Rollouts"], ["evaluation", "Evaluation"]];
const THEMES = ["system", "light", "dark"];

function top() {
  const theme = setting("theme", "system");
  fill(document.getElementById("top"),
    el("a", { class: "brand", href: address(["overview"]) }, "msrl",
      el("span", { class: "quiet" }, ` ${visible(state.runs.map((run) => run.name).join(", "))}`)),
    el("nav", { "aria-label": "Pages" }, LINKS.map(([page, label]) =>
      el("a", { href: address([page]), "aria-current": isCurrent(page) ? "page" : null }, label))),
    options.live ? el("span", { class: "live", title: "The page updates while the run goes on" }, "live") : null,
    el("button", { type: "button", class: "theme", "aria-label": "Keys",
      on: { click: () => document.querySelector("dialog.keys").showModal() } }, "?"),
    el("button", { type: "button", class: "theme", "aria-label": `Colors: ${theme}`,
      on: { click: nextTheme } }, { system: "\u25d0", light: "\u2600", dark: "\u263e" }[theme]));
}

function isCurrent(page) {
  const word = route().words[0];
  return word === page || (page === "rollouts" && ["group", "sample"].includes(word));
}

function nextTheme() {
  const theme = THEMES[(THEMES.indexOf(setting("theme", "system")) + 1) % THEMES.length];
  remember("theme", theme);
  applyTheme();
  show();
}

function applyTheme() {
  const theme = setting("theme", "system");
  const isDark = theme === "dark" || (theme === "system" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
}

let shownAddress = "";

async function show() {
  const main = document.getElementById("main");
  const { words } = route();
  const page = PAGES[words[0]] ?? overviewPage;
  top();
  try {
    await page(main, words);
  } catch (error) {
    fill(main, el("h1", {}, "This page cannot be shown"), el("p", { class: "bad" }, visible(error.message)));
  }
  if (shownAddress && shownAddress !== words.join("/")) {
    if (!main.querySelector("mark")) scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
  shownAddress = words.join("/");
}

/** Act on single keys: 1 to 4 pages, / search, p and n previous and next, ? this list. */
function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches?.("input, select, textarea")) return;
  const number = Number(event.key) - 1;
  if (event.key === "/") document.querySelector("main input[type=search]")?.focus();
  else if (event.key === "?") document.querySelector("dialog.keys").showModal();
  else if (number in LINKS) location.hash = address([LINKS[number][0]]);
  else if (event.key === "p" || event.key === "n") document.querySelector(`main [data-key="${event.key}"]`)?.click();
  else return;
  event.preventDefault();
}

function keyDialog() {
  const rows = [["1 2 3 4", "pages"], ["/", "search"], ["p n", "previous and next sample or step"],
    ["\u2191 \u2193 Enter", "rows of a list"], ["\u2190 \u2192", "tokens"], ["?", "this list"]];
  return el("dialog", { class: "keys", "aria-label": "Keys" }, facts(rows.map(([key, text]) => [text, el("kbd", {}, key)])),
    el("form", { method: "dialog" }, el("button", {}, "Close")));
}

/** Show new data, but not while someone types. */
function showUpdate() {
  if (document.activeElement?.matches("main input:not([type=checkbox]), main select")) setTimeout(showUpdate, 1000);
  else show();
}

async function start() {
  applyTheme();
  document.body.append(keyDialog());
  restoreCurves();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    applyTheme();
    show();
  });
  try {
    state.runs = await chunk("runs");
    hideOldRuns();
  } catch (error) {
    fill(document.getElementById("main"), el("p", { class: "bad" }, error.message));
    return;
  }
  addEventListener("keydown", onKey);
  addEventListener("hashchange", () => {
    if (location.hash !== "#main") show();
  });
  await show();
  watch(showUpdate);
}

start();
