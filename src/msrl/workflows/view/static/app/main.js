/** Navigation between the pages. */

import { address, options, remember, route, setting, state } from "./state.js";
import { el, fill } from "./dom.js";
import { visible } from "./text.js";
import { chunk, watch } from "./data.js";
import { overviewPage, restoreSmoothing } from "./overview.js";
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
    scrollTo(0, 0);
    main.focus({ preventScroll: true });
  }
  shownAddress = words.join("/");
}

async function start() {
  applyTheme();
  restoreSmoothing();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    applyTheme();
    show();
  });
  try {
    state.runs = await chunk("runs");
  } catch (error) {
    fill(document.getElementById("main"), el("p", { class: "bad" }, error.message));
    return;
  }
  addEventListener("hashchange", () => {
    if (location.hash !== "#main") show();
  });
  await show();
  watch(show);
}

start();
