/** State of the pages: runs, settings that the browser remembers, and the current address. */

export const options = JSON.parse(document.getElementById("options").textContent);

export const state = {
  runs: [], // overviews of the runs, as written by Python
  hidden: new Set(), // numbers of runs whose curves are not drawn
  smoothing: 0,
  axis: "step", // a name of AXES in charts.js
  isLog: false,
  search: null, // function that searches in all texts, in pages of a server
  saveNotes: null, // function that saves tags and note of a run, in pages of a server
};

const RUN_COLORS = 8; // run-0 to run-7 in style.css

/** Return the number of the color of a run. */
export function runColor(run) {
  return run % RUN_COLORS;
}

/** Return a setting that the browser remembers, or the default. Pages on disk may have no storage. */
export function setting(name, fallback) {
  try {
    return localStorage.getItem(`msrl.${name}`) ?? fallback;
  } catch {
    return fallback;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(`msrl.${name}`, value);
  } catch {
    // Without storage, the setting lasts as long as the page.
  }
}

/** Return the path and the parameters of the address after the #. */
export function route() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const words = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { words: words.length ? words : ["overview"], query: new URLSearchParams(query ?? "") };
}

/** Return an address within the page. Empty parameters are left out. */
export function address(words, query = {}) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    if (value !== "" && value !== null && value !== undefined) parameters.set(name, String(value));
  }
  const text = parameters.toString();
  return `#/${words.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Go to an address. With `replace`, the page before it stays the one that "back" shows. */
export function go(words, query = {}, replace = false) {
  const target = address(words, query);
  if (replace) location.replace(target);
  else location.hash = target;
}
