// What is said to the user when something is in the way. The keys are error codes of the server and names of the
// browser's errors.

const LOST = "The connection was lost and could not be taken up again. What was written down is still shown here.";
const FULL = "The server is full, and its waiting line is too. Try again in a minute.";

export const WORDS = {
  NotAllowedError: "The microphone was refused. Allow it for this page in the browser's address bar and press Talk again, or play it a file.",
  NotFoundError: "There is no microphone on this device. Plug one in, or play it a file.",
  NotReadableError: "The microphone is in use by another program. Close that one, or play it a file.",
  insecure: "Browsers give the microphone to https pages and to this machine's own (http://127.0.0.1) only. Playing it a file works everywhere.",
  microphone: "The microphone could not be opened.",
  file: (name) => `${name} is no audio file that this browser can read. WAV, FLAC, MP3 and Ogg mostly work.`,

  invalid_api_key: "The key is wrong. Put in one of the server's keys under Settings and try again.",
  api_key_required: "This server answers its own machine only, because it was started without keys (A2T_API_KEYS).",
  origin_not_allowed: "The server does not take calls from pages of this address; its A2T_ALLOWED_ORIGINS has to list it.",
  full: FULL,
  resource_exhausted: FULL,
  cache_full: "This conversation has filled its memory and cannot go on. Start another one with a smaller budget.",
  unreachable: "The server cannot be reached. Is it running?",
  lost: LOST,
  session_not_found: LOST, // it was away for longer than the server waits
  resume_refused: LOST,

  queued: (place, wait) =>
    `The server is full. You are number ${place} in line` + (wait ? `, about ${Math.ceil(wait)} s.` : "."),
  dropped: "The connection dropped. Taking it up again…",
  resumed: "Connected again; nothing was lost.",
};
