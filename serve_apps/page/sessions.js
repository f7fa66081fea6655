// The list of conversations on this server, asked for every few seconds while the page is in view.

import { get } from "./call.js";
import { GROUPS, bytes, clock, colour, count, grouped } from "./kinds.js";

const EVERY_MS = 2000;

/** `key` and `mine` are functions: the key to ask with, the id of this page's own conversation. */
export function watchSessions(table, words, key, mine) {
  const ask = async () => {
    if (!document.hidden) {
      const { data, error } = await get("v1/sessions", key());
      if (error) words.textContent = "The list cannot be seen from here.";
      else show(table, words, data.filter((view) => view.state !== "closed"), mine());
      table.hidden = Boolean(error) || !table.tBodies[0].rows.length;
    }
    setTimeout(ask, EVERY_MS);
  };
  ask();
}

function show(table, words, views, mine) {
  const memory = views.reduce((sum, v) => sum + (v.memory?.kv_bytes ?? 0) + (v.memory?.encoder_bytes ?? 0), 0);
  words.textContent = views.length ? `${views.length} open, ${bytes(memory)} of memory together.` : "None.";
  table.tBodies[0].replaceChildren(...views.map((view) => row(view, mine)));
}

function row(view, mine) {
  const tr = document.createElement("tr");
  const { residents = {}, total = 0, kv_bytes = 0, encoder_bytes = 0 } = view.memory ?? {};
  const isMine = view.id === mine;
  tr.classList.toggle("mine", isMine);
  const cells = [
    view.id.replace("sess_", "").slice(0, 8) + (isMine ? " (this one)" : ""),
    view.state,
    view.units === undefined ? "" : clock(view.units),
    total ? count(total) : "",
    total ? bytes(kv_bytes + encoder_bytes) : "",
  ];
  for (const text of cells) tr.insertCell().textContent = text;
  tr.insertCell().append(stack(grouped(residents), total));
  return tr;
}

function stack(groups, total) {
  const bar = document.createElement("span");
  bar.className = "stack";
  bar.setAttribute("role", "img");
  bar.ariaLabel = groups.map((n, g) => `${GROUPS[g].label} ${count(n)}`).join(", ");
  groups.forEach((n, g) => {
    const part = document.createElement("span");
    part.style.background = colour(GROUPS[g].name);
    part.style.width = `${(100 * n) / Math.max(1, total)}%`;
    bar.append(part);
  });
  return bar;
}
