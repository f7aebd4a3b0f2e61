/** Milliseconds for each token over the position, measured in constant memory, and how they are drawn. */

const MEASURED_MS = 150; // milliseconds of work in one measurement
export const FAR = 10_000; // position at the right end of the plot, until the text is longer
const MEDIAN_RADIUS = 4; // measurements on each side whose median is drawn
const [LEFT, RIGHT, TOP, BOTTOM] = [58, 14, 8, 32]; // pixels around the plot
const MAX_POINTS = 400; // measurements; then neighbours are joined

/**
 * @typedef {{from: number, to: number, ms: number}} Point tokens from one position to another, and their time
 */

/** Measures how fast tokens come. Memory stays constant, however long a stream becomes. */
export class Speed {
  /** @type {Point[]} */
  points = [];
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
    this.add({ from: this.#from, to: position, ms: this.#ms });
    [this.#from, this.#ms] = [position, 0];
    return true;
  }

  /** @param {Point} point */
  add(point) {
    this.points.push(point);
    if (this.points.length > MAX_POINTS) this.points = joined(this.points);
  }

  /** What comes next is not measured with what came before: the text was edited. */
  cut() {
    this.#from = -1;
  }

  /** Milliseconds for a token, as the median of the measurements; 0 before the first. */
  get median() {
    return median(this.points.map(msPerToken));
  }
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
 * @param {HTMLCanvasElement} canvas @param {Speed} speed
 * @param {((position: number) => number) | null} growing milliseconds for a token at a position
 * @param {{ink: string, faint: string, line: string, other: string}} colours
 */
export function drawTime(canvas, speed, growing, colours) {
  const { context, width, height } = sized(canvas);
  if (!context) return;
  const far = roundUp(Math.max(FAR, ...speed.points.map((p) => p.from)));
  const most = roundUp(Math.max(1.5 * speed.median, growing?.(far) ?? 0));
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
  for (const run of runs(speed.points)) {
    const points = run.map((point, i) => [x(point.to), y(around(run, i))]);
    line(context, [[x(run[0].from), points[0][1]], ...points]);
    const [end, height] = points[points.length - 1];
    context.beginPath();
    context.arc(end, height, 4, 0, 2 * Math.PI);
    context.fill();
  }
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

/** The median of the measurements around one. @param {Point[]} run @param {number} at */
function around(run, at) {
  return median(run.slice(Math.max(0, at - MEDIAN_RADIUS), at + MEDIAN_RADIUS + 1).map(msPerToken));
}

/** @param {number[]} values */
function median(values) {
  return values.toSorted((a, b) => a - b)[values.length >> 1] ?? 0;
}

/** Measurements in stretches in which the position only grows. @param {Point[]} points */
function runs(points) {
  /** @type {Point[][]} */
  const found = [];
  for (const point of points) {
    const run = found[found.length - 1];
    if (run && point.from >= run[run.length - 1].to) run.push(point);
    else found.push([point]);
  }
  return found;
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
