// What goes to the model at 16 kHz (microphone, file) and what comes from it at 24 kHz.

import { WORDS } from "./words.js";

export const RATE_IN = 16000;
const RATE_OUT = 24000;
const PIECE_S = 0.1;
const SOONEST_S = 0.08; // between the arrival of speech and its playing: a cushion against jitter

/** Calls `heard` with 100 ms of 16 kHz float32 at a time, until stopped. */
export class Microphone {
  static async open(context, heard) {
    if (!navigator.mediaDevices) throw new Error(WORDS.insecure);
    let stream;
    try {
      stream = await navigator.mediaDevices.getUserMedia({ audio: { channelCount: 1, echoCancellation: true } });
    } catch (error) {
      throw new Error(WORDS[error.name] ?? `${WORDS.microphone} (${error.message})`);
    }
    await context.audioWorklet.addModule(new URL("resampler.js", import.meta.url));
    return new Microphone(context, stream, heard);
  }

  constructor(context, stream, heard) {
    this.stream = stream;
    this.source = context.createMediaStreamSource(stream);
    this.recorder = new AudioWorkletNode(context, "recorder", { numberOfOutputs: 0 });
    this.recorder.port.onmessage = ({ data }) => heard(data);
    this.source.connect(this.recorder);
  }

  stop() {
    this.recorder.port.onmessage = null;
    this.source.disconnect();
    for (const track of this.stream.getTracks()) track.stop();
  }
}

/** A file, played to the model and to whoever sits here, in real time. */
export class Recording {
  static async open(context, file, heard, ended) {
    let sound;
    try {
      sound = await context.decodeAudioData(await file.arrayBuffer());
    } catch {
      throw new Error(WORDS.file(file.name));
    }
    const offline = new OfflineAudioContext(1, Math.ceil(sound.duration * RATE_IN), RATE_IN);
    const source = offline.createBufferSource();
    source.buffer = sound;
    source.connect(offline.destination); // mixes down to one channel and resamples
    source.start();
    return new Recording(context, (await offline.startRendering()).getChannelData(0), sound, heard, ended);
  }

  constructor(context, pcm, sound, heard, ended) {
    const piece = RATE_IN * PIECE_S;
    this.seconds = sound.duration;
    this.source = context.createBufferSource();
    this.source.buffer = sound;
    this.source.connect(context.destination);
    this.source.start();
    const start = performance.now();
    let sent = 0;
    this.timer = setInterval(() => {
      // by the clock, not by the number of calls: a browser slows the timers of a hidden tab
      while (sent < pcm.length && sent / RATE_IN <= (performance.now() - start) / 1000) {
        heard(pcm.slice(sent, sent + piece));
        sent += piece;
      }
      if (sent >= pcm.length) {
        this.stop();
        ended();
      }
    }, PIECE_S * 500);
  }

  stop() {
    clearInterval(this.timer);
    this.source.disconnect();
  }
}

/** Plays speech as it comes, piece after piece without a gap. */
export class Player {
  constructor(context) {
    this.context = context;
    this.meter = context.createAnalyser();
    this.meter.connect(context.destination);
    this.until = 0; // when all that is scheduled will have been played
    this.playing = new Set();
    this.scheduled = 0; // samples, ever
  }

  play(pcm) {
    const buffer = this.context.createBuffer(1, pcm.length, RATE_OUT);
    buffer.copyToChannel(pcm, 0);
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.meter);
    source.onended = () => this.playing.delete(source);
    this.playing.add(source);
    const at = Math.max(this.until, this.context.currentTime + SOONEST_S);
    source.start(at);
    this.until = at + buffer.duration;
    this.scheduled += pcm.length;
  }

  /** Cuts off what has not been heard yet: it was interrupted. */
  stop() {
    for (const source of this.playing) source.stop();
    this.playing.clear();
    this.until = 0;
  }

  /** How loud it is at this moment: the root mean square. */
  get level() {
    const wave = new Float32Array(this.meter.fftSize);
    this.meter.getFloatTimeDomainData(wave);
    return Math.sqrt(wave.reduce((sum, v) => sum + v * v, 0) / wave.length);
  }
}

export function toBase64(pcm) {
  const raw = new Uint8Array(pcm.buffer, pcm.byteOffset, pcm.byteLength);
  let text = "";
  for (let i = 0; i < raw.length; i += 0x8000) text += String.fromCharCode(...raw.subarray(i, i + 0x8000));
  return btoa(text);
}

export function fromBase64(text) {
  return new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
}
