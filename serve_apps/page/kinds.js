// The kinds of position as they are shown, in the order of the stack: what stays first, what may be evicted above it.

export const GROUPS = [
  { name: "prefix", label: "prompt", kinds: ["prefix"] },
  { name: "transcript", label: "heard text", kinds: ["transcript"] },
  { name: "response", label: "said text", kinds: ["response"] },
  { name: "audio", label: "audio", kinds: ["audio"] },
  { name: "structure", label: "structure", kinds: ["marker", "decision", "asr", "terminator"] },
];

/** Positions by group, in the order of GROUPS. */
export function grouped(residents) {
  return GROUPS.map(({ kinds }) => kinds.reduce((sum, kind) => sum + (residents[kind] ?? 0), 0));
}

export const colour = (name) => `var(--${name})`;

export const count = (n) => Math.round(n).toLocaleString("en");

export function bytes(n) {
  if (n < 1e6) return `${(n / 1e3).toFixed(0)} kB`;
  return n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`;
}

export function clock(seconds) {
  const pad = (n) => String(Math.floor(n)).padStart(2, "0");
  const minutes = `${pad((seconds / 60) % 60)}:${pad(seconds % 60)}`;
  return seconds < 3600 ? minutes : `${Math.floor(seconds / 3600)}:${minutes}`;
}
