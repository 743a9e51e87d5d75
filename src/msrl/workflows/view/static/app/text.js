/** Texts of models and numbers, as they are shown. */

import { el } from "./dom.js";

// Control characters, which could reorder, hide or break text.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

/** Return a text in which control characters are visible. */
export function visible(text) {
  return text.replace(CONTROL, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    if (code === 0x7f) return "\u2421";
    return `[U+${code.toString(16).toUpperCase().padStart(4, "0")}]`;
  });
}

/** Return a number with about four significant digits. */
export function digits(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

export function percent(value) {
  return value === null || value === undefined ? "-" : `${digits(Math.round(1000 * value) / 10)}%`;
}

/** Return a duration in seconds as text. */
export function duration(seconds) {
  if (seconds < 60) return `${digits(seconds)} s`;
  const whole = Math.round(seconds);
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes} min ${whole % 60} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

export function mean(values) {
  const finite = values.filter((value) => value !== null && Number.isFinite(value));
  return finite.length ? finite.reduce((sum, value) => sum + value, 0) / finite.length : null;
}

export function count(number, noun) {
  return `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
}

export const VERDICTS = { 1: "right", 0: "wrong", "-1": "not judged" };

const MARKS = { 1: "\u2713", 0: "\u2717", "-1": "\u2013" };

/** Return the mark of a verdict; a symbol and a word, because colors alone do not tell. */
export function verdictText(verdict) {
  return `${MARKS[verdict]} ${VERDICTS[verdict]}`;
}

/** Return the pattern that finds a searched text. */
export function searchPattern(text, flags) {
  return new RegExp(text.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&"), flags);
}

/** Return a text as nodes in which the hits of a search are marked. */
export function highlighted(text, wanted) {
  if (!wanted) return visible(text);
  const parts = text.split(new RegExp(`(${searchPattern(wanted, "").source})`, "iu"));
  return parts.map((part, i) => (i % 2 ? el("mark", {}, visible(part)) : visible(part)));
}

/** Return the part of a text around the first hit of a search, on one line. */
export function snippet(text, wanted) {
  const at = Math.max(0, text.search(searchPattern(wanted, "iu")));
  const start = Math.max(0, at - 30);
  return `${start ? "\u2026 " : ""}${text.slice(start, at + wanted.length + 120)}`.replace(/\s+/g, " ");
}
