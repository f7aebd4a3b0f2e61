/** Milliseconds for each token over the position, measured in constant memory, and how they are drawn. */

const MEASURED_MS = 150; // milliseconds of work in one measurement
export const FAR = 10_000; // position at the right end of the plot, until the text is longer
const RADIUS = 12; // measurements on each side that belong to the window of one
const ENOUGH = 4; // measurements; the first ones are of an engine that starts
export const BUSY = 2.5; // times the best reading, above which other programs use the device
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 14, 8, 32]; // pixels around the plot
const MAX_POINTS = 200; // measurements; then neighbours are joined

/**
 * @typedef {{from: number, to: number, ms: number}} Point tokens from one position to another, and their time
 * @typedef {{from: number, to: number, ms: number}} Reading the same, with the time of one token
 */

/**
 * The time of a token in a window of measurements: their lower quartile. What else the device does only ever
 * adds time; of a few measurements the fastest may have been cut too short.
 * @param {number[]} values at least one
 */
export function typical(values) {
  return values.toSorted((a, b) => a - b)[Math.round(values.length / 4)];
}

/** Measures how fast tokens come. Memory stays constant, however long a stream becomes. */
export class Speed {
  /** @type {Point[]} */
  points = [];
  /** @type {Reading[]} from reading far into a text of its own */
  far = [];
  /** Milliseconds of the fastest reading so far; Infinity before the first. */
  best = Infinity;
  #from = -1; // where the present measurement began; -1 where none has
  #ms = 0; // of work in it
  #at = 0;

  /**
   * Tokens begin to come now, from this position on.
   * @param {number} position @param {number} now milliseconds
   */
  begin(position, now) {
    if (this.#from < 0 || position < this.#from) [this.#from, this.#ms] = [position, 0];
    this.#at = now;
  }

  /**
   * The stream is at this position now; returns whether a measurement was added.
   * @param {number} position @param {number} now
   */
  reach(position, now) {
    this.#ms += now - this.#at;
    this.#at = now;
    if (this.#ms < MEASURED_MS || position <= this.#from) return false;
    this.points.push({ from: this.#from, to: position, ms: this.#ms });
    if (this.points.length > MAX_POINTS) this.points = joined(this.points);
    if (this.points.length >= ENOUGH)
      this.best = Math.min(this.best, around(this.points, this.points.length - 1).ms);
    [this.#from, this.#ms] = [position, 0];
    return true;
  }

  /**
   * One more reading far into a text.
   * @param {number} position @param {number[]} values milliseconds for a token, by request
   */
  readFar(position, values) {
    this.far.push({ from: position, to: position, ms: typical(values) });
    this.best = Math.min(this.best, typical(values));
  }

  /** What comes next is not measured with what came before: the text was edited. */
  cut() {
    this.#from = -1;
  }

  /** Whether the readings far into a text are shown, until the text itself is longer. */
  get showsFar() {
    return (this.far.at(-1)?.to ?? 0) > (this.points.at(-1)?.to ?? 0);
  }

  /** What is shown: of the latest text. The last one is now. */
  get readings() {
    if (this.showsFar) return this.far;
    const first = this.points.findLastIndex(({ from }, i) => from < (this.points[i - 1]?.to ?? 0));
    return this.points.map((_, i) => around(this.points, i)).slice(Math.max(0, first));
  }

  /** Whether some of what is shown took much longer than the best reading. */
  get busy() {
    return this.readings.some(({ ms }) => ms > BUSY * this.best);
  }
}

/** The reading at one of the measurements. @param {Point[]} points @param {number} at @returns {Reading} */
function around(points, at) {
  const near = points.slice(Math.max(0, at - RADIUS), at + RADIUS + 1);
  const { from, to } = points[at];
  return { from, to, ms: typical(near.map(msPerToken)) };
}

/** @param {Point[]} points */
function joined(points) {
  const halved = [];
  for (let i = 0; i < points.length; i += 2) {
    const [a, b] = [points[i], points[i + 1] ?? points[i]];
    const apart = b.from !== a.to; // the stream began again between them
    if (b === a || apart) halved.push(...(a === b ? [a] : [a, b]));
    else halved.push({ from: a.from, to: b.to, ms: a.ms + b.ms });
  }
  return halved.length > MAX_POINTS ? halved.slice(-MAX_POINTS / 2) : halved;
}

/** @param {Point} point */
function msPerToken(point) {
  return point.ms / (point.to - point.from);
}

/** The next round number. @param {number} value */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 1.5, 2, 3, 4, 5, 6, 8].find((step) => step * power >= value) ?? 10) * power;
}

/**
 * Draws the measurements, and what a growing cache would need: both axes are linear and begin at zero.
 * @param {HTMLCanvasElement} canvas @param {Reading[]} readings
 * @param {((position: number) => number) | null} growing milliseconds for a token at a position
 * @param {{ink: string, faint: string, line: string, other: string}} colours
 */
export function drawTime(canvas, readings, growing, colours) {
  const { context, width, height } = sized(canvas);
  if (!context) return;
  const now = readings.at(-1);
  const far = roundUp(Math.max(FAR, now?.from ?? 0));
  const most = roundUp(Math.max(1.5 * (now?.ms ?? 0), growing?.(far) ?? 0));
  const x = (/** @type {number} */ p) => LEFT + (p / far) * (width - LEFT - RIGHT);
  const y = (/** @type {number} */ ms) =>
    height - BOTTOM - (Math.min(ms, most) / most) * (height - BOTTOM - TOP);
  context.clearRect(0, 0, width, height);
  frame(context, [0, most / 2, most].map(y), [LEFT, width - RIGHT], colours.faint);
  write(context, colours.ink, [
    ...[0, most / 2, most].map((ms) => [`${label(ms)} ms`, LEFT - 6, y(ms) + 4, "right"]),
    ...[0, far / 2, far].map((p) => [label(p), x(p), height - BOTTOM + 14, p === far ? "right" : "center"]),
    ["tokens so far", (LEFT + width - RIGHT) / 2, height - 4, "center"],
  ]);
  context.lineWidth = 2;
  context.lineJoin = "round";
  if (growing) {
    context.strokeStyle = colours.other;
    context.setLineDash([6, 4]);
    line(context, [
      [x(0), y(growing(0))],
      [x(far), y(growing(far))],
    ]);
    context.setLineDash([]);
  }
  context.strokeStyle = colours.line;
  context.fillStyle = colours.line;
  if (!now) return;
  line(context, [[x(readings[0].from), y(readings[0].ms)], ...readings.map(({ to, ms }) => [x(to), y(ms)])]);
  context.beginPath();
  context.arc(x(now.to), y(now.ms), 4, 0, 2 * Math.PI);
  context.fill();
}

/** @param {CanvasRenderingContext2D} context @param {number[][]} points */
function line(context, points) {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.stroke();
}

/**
 * @param {CanvasRenderingContext2D} context @param {number[]} lines
 * @param {number[]} ends @param {string} colour
 */
function frame(context, lines, [left, right], colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  for (const line of lines) {
    context.beginPath();
    context.moveTo(left, Math.round(line) + 0.5);
    context.lineTo(right, Math.round(line) + 0.5);
    context.stroke();
  }
}

/**
 * @param {CanvasRenderingContext2D} context @param {string} colour
 * @param {any[][]} texts
 */
function write(context, colour, texts) {
  context.font = "11px system-ui, sans-serif";
  context.fillStyle = colour;
  for (const [text, x, y, align] of texts) {
    context.textAlign = /** @type {CanvasTextAlign} */ (align);
    context.fillText(text, x, y);
  }
}

/** @param {number} value */
function label(value) {
  return value.toLocaleString("en", { maximumSignificantDigits: 3 });
}

/**
 * The drawing context of a canvas at the screen's resolution, and its size in CSS pixels.
 * @param {HTMLCanvasElement} canvas
 */
export function sized(canvas) {
  const ratio = globalThis.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const context = canvas.getContext("2d");
  context?.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, width, height };
}
