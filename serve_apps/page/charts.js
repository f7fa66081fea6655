// The two charts, drawn as SVG from the seconds so far. The whole conversation is always in view.

import { GROUPS, bytes, colour, count, grouped } from "./kinds.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 54, RIGHT = 8, TOP = 14, AXIS = 18;
const STRIP = 34; // under the memory: what was forgotten
const SHORTEST = 30; // seconds that fill the width at least

/** The seconds of a conversation: what `a2t.unit` said of each, and running totals. */
export class History {
  units = [];
  budget = null;
  forgotten = 0;
  missed = 0;

  add(event) {
    this.forgotten += event.evicted;
    this.missed += event.missed ? 1 : 0;
    const groups = grouped(event.residents);
    this.units.push({
      unit: event.unit,
      groups,
      total: event.resident_total,
      without: event.resident_total + this.forgotten,
      evicted: event.evicted,
      ms: event.unit_ms,
      deadline: event.deadline_ms,
      missed: event.missed,
      bytes: event.kv_bytes + event.encoder_bytes,
    });
  }

  get last() {
    return this.units.at(-1);
  }
}

export function drawMemory(svg, history) {
  const { units, budget, last } = history;
  const plot = frame(svg, units.length, Math.max(budget ?? 0, last?.without ?? 0, 10), count, STRIP);
  const sums = units.map(({ groups }) => groups.reduce((out, n) => [...out, out.at(-1) + n], [0]));
  GROUPS.forEach(({ name }, g) => {
    const top = steps(plot, sums, (s) => s[g + 1]);
    const bottom = steps(plot, sums, (s) => s[g]).reverse();
    if (units.length) add(svg, "path", { d: line([...top, ...bottom]) + "Z", fill: colour(name), "data-kind": name });
  });
  if (units.length) {
    add(svg, "path", { d: line(steps(plot, units, (u) => u.without)), class: "without" });
    const most = Math.max(1, ...units.map((u) => u.evicted));
    const floor = plot.y(0) + 2;
    add(svg, "path", {
      class: "evicted",
      d: bars(plot, units, (u) => [floor, (u.evicted / most) * (STRIP - 6)]),
    });
  }
  if (budget !== null) rule(svg, plot, budget, "budget", `budget ${count(budget)}`);
  if (last?.evicted) { // where it was a moment ago
    const above = plot.y(last.total + last.evicted);
    add(svg, "rect", {
      class: "leaving", x: plot.x(units.length - 1), y: above,
      width: Math.max(3, plot.x(1) - plot.x(0)), height: Math.max(2, plot.y(last.total) - above),
    });
  }
  svg.setAttribute("aria-label", `Memory of the conversation. ${memoryWords(history)}`);
}

export function memoryWords({ last, budget, forgotten }) {
  if (!last) return "Positions in the cache by kind; below the line, what was forgotten in that second.";
  const of = budget === null ? "no budget" : `of a budget of ${count(budget)}`;
  return `${count(last.total)} positions (${bytes(last.bytes)}), ${of}; ${count(forgotten)} forgotten. ` +
    `Without eviction it would be ${count(last.without)}.`;
}

export function drawTime(svg, history) {
  const { units, last } = history;
  const deadline = last?.deadline ?? 1000;
  const most = Math.max(deadline * 1.1, ...units.map((u) => u.ms));
  const plot = frame(svg, units.length, most, (ms) => `${count(ms)} ms`, 0);
  const bar = (wanted) => (u) => [plot.y(u.missed === wanted ? u.ms : 0), plot.y(0) - plot.y(u.missed === wanted ? u.ms : 0)];
  if (units.length) {
    add(svg, "path", { class: "unit", d: bars(plot, units, bar(false)) });
    add(svg, "path", { class: "missed", d: bars(plot, units, bar(true)) });
  }
  rule(svg, plot, deadline, "deadline", "one second");
  svg.setAttribute("aria-label", `Unit time. ${timeWords(history)}`);
}

export function timeWords({ units, last, missed }) {
  if (!last) return "A second of sound has to be done within a second.";
  const mean = units.reduce((sum, u) => sum + u.ms, 0) / units.length;
  const over = missed ? `${count(missed)} of ${count(units.length)} took longer than a second.` : "None took longer than a second.";
  return `Last ${count(last.ms)} ms, mean ${count(mean)} ms. ${over}`;
}

/** Clears `svg`, draws its axes, and returns where a second and a value are. */
function frame(svg, seconds, most, label, strip) {
  svg.replaceChildren();
  const { clientWidth: width, clientHeight: height } = svg.parentElement ? svg : { clientWidth: 600, clientHeight: 200 };
  const bottom = height - AXIS - strip;
  const span = Math.max(seconds, SHORTEST);
  const x = (second) => LEFT + ((width - LEFT - RIGHT) * second) / span;
  const y = (value) => bottom - ((bottom - TOP) * value) / most;
  for (const value of ticks(most, 4)) {
    add(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
    add(svg, "text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }).textContent = label(value);
  }
  for (const second of ticks(span, 6)) {
    if (second % 1) continue;
    add(svg, "text", { x: x(second), y: height - 4, "text-anchor": "middle" }).textContent = `${second} s`;
  }
  return { x, y, right: width - RIGHT };
}

function rule(svg, plot, value, name, words) {
  add(svg, "line", { class: name, x1: LEFT, x2: plot.right, y1: plot.y(value), y2: plot.y(value) });
  add(svg, "text", { x: plot.right, y: plot.y(value) - 4, "text-anchor": "end" }).textContent = words;
}

/** Round values from 0 to `most`, about `wanted` of them. */
export function ticks(most, wanted) {
  const rough = most / wanted;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = ten * [1, 2, 5, 10].find((n) => n * ten >= rough);
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, i) => i * step);
}

/** Corners of a line that holds each second's value for that second; long conversations are thinned to the pixels. */
function steps(plot, values, of) {
  const out = [];
  for (const i of pixels(plot, values.length)) {
    const y = plot.y(of(values[i.last]));
    out.push([plot.x(i.first), y], [plot.x(i.last + 1), y]);
  }
  return out;
}

/** One path for all bars. `of` gives top and height; where several seconds share a pixel the tallest is drawn. */
function bars(plot, values, of) {
  let d = "";
  for (const { first, last } of pixels(plot, values.length)) {
    const [top, height] = values.slice(first, last + 1).map(of).reduce((a, b) => (b[1] > a[1] ? b : a));
    const wide = Math.max(1, (plot.x(last + 1) - plot.x(first)) * 0.8);
    if (height > 0) d += `M${round(plot.x(first))} ${round(top)}h${round(wide)}v${round(height)}h${round(-wide)}Z`;
  }
  return d;
}

function pixels(plot, length) {
  const each = Math.max(1, Math.ceil(1 / (plot.x(1) - plot.x(0))));
  const runs = [];
  for (let first = 0; first < length; first += each) runs.push({ first, last: Math.min(length, first + each) - 1 });
  return runs;
}

const round = (n) => Math.round(n * 10) / 10;
const line = (points) => "M" + points.map(([x, y]) => `${round(x)} ${round(y)}`).join("L");

function add(svg, tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return svg.appendChild(element);
}
