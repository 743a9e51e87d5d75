/** What only the pages of `msrl view --serve` can do: search in all texts, save tags and notes. */

import { state } from "./state.js";

state.search = async (run, kind, text) => {
  const answer = await fetch(`search?${new URLSearchParams({ run, kind, text })}`);
  return answer.json();
};

/** Return true if the server has saved the tags and the note of a run. */
state.saveNotes = async (run, { tags, note }) => {
  const answer = await fetch("notes", { method: "POST", body: JSON.stringify({ run, tags, note }) });
  return answer.ok;
};
