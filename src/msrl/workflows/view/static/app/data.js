/** Data files, which load as scripts on demand, and the columns of all samples. */

import { options, state } from "./state.js";

const loaded = new Map(); // values of files that were not requested yet, by name
const pending = new Map(); // promises by name
const recent = []; // names of detail files in the order of their use
const MAX_RECENT = 12; // files of samples in memory

window.msrlChunk = (name, value) => loaded.set(name, value);

/** Return the value of a data file. */
export function chunk(name) {
  if (!pending.has(name)) {
    const promise = options.inline ? inline(name) : script(name);
    pending.set(name, promise);
    promise.catch(() => pending.delete(name));
  }
  return pending.get(name);
}

function inline(name) {
  const element = [...document.querySelectorAll("script[data-chunk]")].find(
    (script) => script.dataset.chunk === name,
  );
  if (!element) return Promise.reject(new Error(`No data of the name ${name}`));
  return Promise.resolve(JSON.parse(element.textContent));
}

function script(name, version = "") {
  return new Promise((resolve, reject) => {
    const element = document.createElement("script");
    element.src = `data/${name}.js${version}`;
    element.onload = () => {
      element.remove();
      resolve(loaded.get(name));
      loaded.delete(name);
    };
    element.onerror = () => {
      element.remove();
      reject(new Error(`The file data/${name}.js is missing. Run msrl view again.`));
    };
    document.head.append(element);
  });
}

/** Read a file again, past the browser's cache. */
export function reload(name) {
  pending.set(name, script(name, `?${Date.now()}`));
  return pending.get(name);
}

/** Forget files that a later version of the view may have replaced. */
export function forget(run) {
  for (const name of [...pending.keys()]) {
    if (name.startsWith(`${run}/`)) pending.delete(name);
  }
}

/** Return the details of a sample. */
export async function details(run, kind, step, row) {
  const entry = tableEntry(run, kind, step);
  const [pack, position, first] = entry?.parts.findLast((part) => part[2] <= row) ?? [];
  if (pack === undefined) throw new Error(`Run ${run} has no ${kind} of step ${step}.`);
  const rows = await samplePack(`${run}/${kind}-samples-${pack}`);
  const sample = rows[position + row - first];
  if (!sample || row >= entry.count) throw new Error(`Step ${step} has no sample ${row}.`);
  sample.sequences.forEach(unpack);
  sample.sequences[0].images = sample.images;
  return sample;
}

/** Return the thumbnails of a pack. */
export function imagePack(run, pack) {
  return samplePack(`${run}/images-${pack}`);
}

function samplePack(name) {
  const index = recent.indexOf(name);
  if (index >= 0) recent.splice(index, 1);
  recent.push(name);
  while (recent.length > MAX_RECENT) pending.delete(recent.shift());
  return chunk(name);
}

/** Decode the arrays of a sequence. A number stands for an array of equal values. */
function unpack(sequence) {
  if (typeof sequence.ids === "object") return;
  const ids = decoded(sequence.ids, Int32Array);
  sequence.ids = typeof ids === "number" ? new Array(sequence.length).fill(ids) : Array.from(ids);
  sequence.sampled = decoded(sequence.sampled, Uint8Array);
  sequence.mask = decoded(sequence.mask, Uint8Array);
  sequence.advantages = decoded(sequence.advantages, Float32Array);
  for (const name of Object.keys(sequence.values)) sequence.values[name] = decoded(sequence.values[name], Float32Array);
}

function decoded(value, type) {
  if (typeof value !== "string") return value;
  return new type(Uint8Array.from(atob(value), (character) => character.charCodeAt(0)).buffer);
}

export function tableEntry(run, kind, step) {
  return state.runs[run]?.tables[kind].find((entry) => entry.step === step);
}

/** Return the columns of all samples of a step. */
export async function stepTable(run, kind, step) {
  const [pack, position] = tableEntry(run, kind, step).table;
  return (await chunk(`${run}/${kind}-tables-${pack}`))[position];
}

/**
 * Load the tables of all steps of a run, and report each through `onStep(entry, table)` in order.
 */
export async function eachTable(run, kind, onStep, isCurrent) {
  const entries = state.runs[run].tables[kind];
  const BATCH = 64;
  for (let start = 0; start < entries.length; start += BATCH) {
    const batch = entries.slice(start, start + BATCH);
    const tables = await Promise.all(batch.map(({ step }) => stepTable(run, kind, step)));
    if (!isCurrent()) return;
    tables.forEach((table, i) => onStep(batch[i], table));
  }
}

/** Call `onChange` whenever the view was written again. */
export function watch(onChange) {
  if (!options.live) return;
  let version = null;
  setInterval(async () => {
    try {
      const current = await reload("version");
      if (version !== null && current !== version) {
        state.runs = await reload("runs");
        state.runs.forEach((_, run) => forget(run));
        onChange();
      }
      version = current;
    } catch {
      // The server may have ended; the page stays usable.
    }
  }, 3000);
}
