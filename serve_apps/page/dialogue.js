// What was heard and answered, as lines that grow while they are written.

import { clock } from "./kinds.js";

export class Dialogue {
  #open = {}; // the line that each side is writing: {words, unit}

  constructor(log) {
    this.log = log;
  }

  /** `unit` is the second in which it was heard. A pause or the other side's word ends a line. */
  heard(unit, text) {
    const line = this.#open.hears;
    if (line && unit - line.unit <= 1) line.words.append(` ${text}`);
    else this.#begin("hears", unit, text);
    this.#open.hears.unit = unit;
    this.#follow();
  }

  /** Pieces of an answer join as they are. */
  said(unit, text, ends) {
    if (text && this.#open.says) this.#open.says.words.append(text);
    else if (text) this.#begin("says", unit, text.trimStart());
    if (ends) delete this.#open.says;
    this.#follow();
  }

  #begin(who, unit, text) {
    this.log.querySelector(".empty")?.remove();
    const line = document.createElement("p");
    line.className = `turn ${who}`;
    const words = document.createElement("span");
    words.textContent = text;
    const time = Object.assign(document.createElement("time"), { textContent: clock(unit) });
    line.append(time, Object.assign(document.createElement("b"), { textContent: who }), words);
    this.log.append(line);
    this.#open[who] = { words, unit };
  }

  #follow() {
    this.log.scrollTop = this.log.scrollHeight;
  }
}
