// Ticks that fall on round values.

/** Values from 0 to at least `most`, three to six of them, in steps of 1, 2, 2.5 or 5. */
export function valueTicks(most, count = 4) {
  if (!(most > 0)) return [0, 1];
  const rough = most / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const ticks = [];
  for (let i = 0; i * step < most + step * 0.999; i += 1) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

/** Digits after the decimal point. */
export function decimals(value) {
  const [mantissa, exponent] = String(value).split("e-");
  return (mantissa.split(".")[1] ?? "").length + Number(exponent ?? 0);
}

const STEPS_S = [10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 259200, 604800, 1209600, 2592000];

/** Round times of day between two Unix times, at most `count`. */
export function timeTicks(from, to, count) {
  const step = STEPS_S.find((size) => (to - from) / size <= count) ?? Math.ceil((to - from) / count / 2592000) * 2592000;
  const offset = new Date(from * 1000).getTimezoneOffset() * 60;
  const ticks = [];
  for (let t = Math.ceil((from - offset) / step) * step + offset; t <= to; t += step) ticks.push(t);
  return { step, ticks };
}
