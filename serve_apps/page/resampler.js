// Runs in the audio thread: the microphone at whatever rate this machine has, in; 16 kHz in pieces of 100 ms, out.

const OUT_RATE = 16000;
const PIECE = OUT_RATE / 10;
const REACH = 16; // zero crossings of the windowed sinc on either side

/** Band-limited resampling, so that nothing above 8 kHz folds into what the model hears. */
class Resampler {
  constructor(rate) {
    this.step = rate / OUT_RATE;
    this.cutoff = Math.min(1, OUT_RATE / rate) * 0.95;
    this.reach = Math.ceil(REACH / this.cutoff);
    this.held = new Float32Array(this.reach); // silence before the first sample
    this.at = this.reach; // of the next output sample, in `held`
  }

  push(samples) {
    const all = new Float32Array(this.held.length + samples.length);
    all.set(this.held);
    all.set(samples, this.held.length);
    const out = [];
    for (; this.at + this.reach < all.length; this.at += this.step) out.push(this.value(all));
    const done = Math.max(0, Math.floor(this.at) - this.reach);
    this.held = all.slice(done);
    this.at -= done;
    return out;
  }

  value(all) {
    const middle = Math.floor(this.at);
    let sum = 0;
    for (let i = middle - this.reach + 1; i <= middle + this.reach; i++) {
      const t = i - this.at;
      const x = Math.PI * t * this.cutoff;
      const sinc = x === 0 ? 1 : Math.sin(x) / x;
      sum += all[i] * sinc * this.cutoff * (0.5 + 0.5 * Math.cos((Math.PI * t) / this.reach));
    }
    return sum;
  }
}

class Recorder extends AudioWorkletProcessor {
  resampler = new Resampler(sampleRate);
  piece = new Float32Array(PIECE);
  filled = 0;

  process([channels]) {
    if (!channels.length) return true;
    const mono = channels[0].map((_, i) => channels.reduce((sum, c) => sum + c[i], 0) / channels.length);
    for (const sample of this.resampler.push(mono)) {
      this.piece[this.filled++] = sample;
      if (this.filled === PIECE) {
        this.port.postMessage(this.piece);
        this.piece = new Float32Array(PIECE);
        this.filled = 0;
      }
    }
    return true;
  }
}

registerProcessor("recorder", Recorder);
