// The page: buttons and files on one side, a call to the server on the other.

import { Call } from "./call.js";
import { History, drawMemory, drawTime, memoryWords, timeWords } from "./charts.js";
import { Dialogue } from "./dialogue.js";
import { GROUPS, clock, colour, count } from "./kinds.js";
import { watchSessions } from "./sessions.js";
import { Microphone, Player, RATE_IN, Recording, fromBase64 } from "./sound.js";
import { WORDS } from "./words.js";

const TAIL_S = 10; // most silence after a file, in which an answer can be finished
const TABLE_ROWS = 120;
const $ = (id) => document.getElementById(id);

let call = null, context = null, player = null, microphone = null, recording = null, tail = null;
let history = new History(), dialogue = new Dialogue($("conversation"));
let speaking = false, questions = 0;

const status = (text) => ($("status").textContent = text);

function trouble(text) {
  $("trouble").hidden = !text;
  $("trouble").textContent = text ?? "";
}

// -- the call --------------------------------------------------------------------------------------------------------

function callUp() {
  if (call && !call.over) return call;
  const form = $("settings-form");
  const config = { tts_enabled: form.speech.checked };
  if (form.budget.value !== "") config.max_kv_tokens = Number(form.budget.value);
  call = new Call({ key: form.key.value.trim(), prompt: form.prompt.value.trim(), config });
  const mine = call;
  const on = (name, then) => call.addEventListener(name, ({ detail }) => mine === call && then(detail));
  history = new History();
  dialogue = new Dialogue($("conversation"));
  $("conversation").replaceChildren();
  $("answers").replaceChildren();
  trouble(null);
  on("state", stateChanged);
  on("frame", take);
  on("failed", ({ code, message }) => trouble(WORDS[code] ?? (message || `The server ended it: ${code}.`)));
  call.open();
  return call;
}

function stateChanged({ state, position, estimated_wait_s: wait, config, resumed }) {
  const words = {
    connecting: "Calling…",
    queued: WORDS.queued(position, wait),
    live: resumed ? WORDS.resumed : "Listening.",
    dropped: WORDS.dropped,
    closed: "The conversation has ended.",
  };
  status(words[state]);
  document.body.dataset.state = state;
  if (config) history.budget = config.max_kv_tokens ?? null;
  if (state === "closed") stopInput();
  $("end").disabled = state === "closed";
  $("interrupt").disabled = state !== "live";
  draw();
}

function take(frame) {
  switch (frame.type) {
    case "conversation.item.input_audio_transcription.completed":
      dialogue.heard(frame.unit, frame.transcript);
      break;
    case "response.output_text.delta":
      dialogue.said(frame.unit, frame.text, frame.end_of_turn);
      break;
    case "response.output_audio.delta":
      player?.play(fromBase64(frame.audio));
      break;
    case "response.done":
      if (frame.response.status === "cancelled") player?.stop();
      break;
    case "a2t.state":
      status({ live: "Listening.", paused: "Paused: it hears nothing at the moment.", moving: "Moving to another engine…",
        restoring: "Its engine was lost; it is being restored…" }[frame.state] ?? frame.state);
      break;
    case "a2t.answer":
      answered(frame);
      break;
    case "a2t.unit":
      if (speaking === frame.listening) status(frame.listening ? "Listening." : "Speaking.");
      speaking = !frame.listening;
      history.add(frame);
      draw();
      break;
  }
}

// -- what it hears ---------------------------------------------------------------------------------------------------

/** Sound needs a context, and browsers give a sounding one only within a click. */
async function awake() {
  if (!context) {
    context = new AudioContext();
    player = new Player(context);
    window.a2t = { player }; // for whoever wants to see whether anything sounds
  }
  await context.resume();
  return context;
}

async function talk() {
  if (microphone) return stopInput();
  stopInput();
  trouble(null);
  try {
    microphone = await Microphone.open(await awake(), (pcm) => call.hear(pcm));
  } catch (error) {
    return trouble(error.message);
  }
  $("talk").textContent = "Stop talking";
  $("talk").ariaPressed = "true";
  callUp();
}

async function play(file) {
  if (!file) return;
  stopInput();
  trouble(null);
  try {
    const sound = await awake();
    recording = await Recording.open(sound, file, (pcm) => call.hear(pcm), () => {
      recording = null;
      sendSilence();
    });
  } catch (error) {
    return trouble(error.message);
  }
  callUp();
  status(`Hearing ${file.name}, ${clock(recording.seconds)}.`);
}

/** After a file the model goes on hearing, so that it can answer. */
function sendSilence() {
  const until = performance.now() + TAIL_S * 1000;
  tail = setInterval(() => {
    if (performance.now() > until) clearInterval(tail);
    else call.hear(new Float32Array(RATE_IN / 2));
  }, 500);
}

function stopInput() {
  microphone?.stop();
  recording?.stop();
  clearInterval(tail);
  microphone = recording = null;
  $("talk").textContent = "Talk";
  $("talk").ariaPressed = "false";
}

// -- questions -------------------------------------------------------------------------------------------------------

function ask(event) {
  event.preventDefault();
  const text = $("question").value.trim();
  if (!text) return;
  if (!call || call.over) return trouble("There is no conversation to ask about. Press Talk or play it a file first.");
  const line = document.createElement("p");
  line.id = `answer-${++questions}`;
  line.textContent = `${text} …`;
  $("answers").prepend(line);
  call.ask(text, line.id);
  $("question").value = "";
}

function answered({ id, question, answer, error }) {
  const line = $(id);
  if (line) line.textContent = `${question} — ${error ? error.message : answer || "(nothing)"}`;
}

// -- what is seen ----------------------------------------------------------------------------------------------------

function draw() {
  drawMemory($("memory"), history);
  drawTime($("time"), history);
  $("memory-words").textContent = memoryWords(history);
  $("time-words").textContent = timeWords(history);
  GROUPS.forEach(({ name }, g) => ($(`count-${name}`).value = history.last ? count(history.last.groups[g]) : ""));
  $("count-evicted").value = history.last ? count(history.forgotten) : "";
  if ($("figures").open) fillTable();
}

function fillTable() {
  const rows = history.units.slice(-TABLE_ROWS).reverse().map((u) => {
    const tr = document.createElement("tr");
    for (const cell of [clock(u.unit), ...u.groups.map(count), count(u.total), count(u.evicted), `${count(u.ms)} ms`]) {
      tr.insertCell().textContent = cell;
    }
    return tr;
  });
  $("figures-body").replaceChildren(...rows);
}

function legend() {
  const item = (name, label, mark = "") => {
    const li = document.createElement("li");
    const swatch = document.createElement("i");
    swatch.className = mark;
    swatch.style[mark ? "borderColor" : "background"] = colour(name);
    li.append(swatch, `${label} `, Object.assign(document.createElement("output"), { id: `count-${name}` }));
    return li;
  };
  $("legend").append(...GROUPS.map(({ name, label }) => item(name, label)));
  $("legend").append(item("without", "without eviction", "rule"), item("evicted", "forgotten"));
  for (const name of ["second", ...GROUPS.map((g) => g.label), "together", "forgotten", "time"]) {
    const th = Object.assign(document.createElement("th"), { scope: "col", textContent: name });
    $("figures-head").append(th);
  }
}

// -- buttons, files, keys --------------------------------------------------------------------------------------------

$("talk").addEventListener("click", talk);
$("end").addEventListener("click", () => call?.close());
$("interrupt").addEventListener("click", () => {
  call?.interrupt();
  player?.stop();
});
$("file").addEventListener("change", ({ target }) => {
  play(target.files[0]);
  target.value = "";
});
$("ask").addEventListener("submit", ask);
$("settings-form").addEventListener("submit", (event) => event.preventDefault());
$("figures").addEventListener("toggle", fillTable);
addEventListener("dragover", (event) => {
  event.preventDefault();
  $("drop").hidden = false;
});
addEventListener("dragleave", (event) => event.relatedTarget || ($("drop").hidden = true));
addEventListener("drop", (event) => {
  event.preventDefault();
  $("drop").hidden = true;
  play(event.dataTransfer.files[0]);
});
$("key").value = sessionStorage.getItem("a2t-key") ?? "";
$("key").addEventListener("change", ({ target }) => sessionStorage.setItem("a2t-key", target.value));
new ResizeObserver(draw).observe($("memory"));
legend();
draw();
watchSessions($("sessions"), $("sessions-words"), () => $("key").value.trim(), () => call?.session?.id);
