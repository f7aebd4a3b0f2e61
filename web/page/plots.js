/** Tokens per second over the position, measured in constant memory; and the bytes that a stream needs. */

const MEASURED_MS = 150; // milliseconds of work in one measurement
const MEDIAN_RADIUS = 4; // measurements on each side whose median is drawn
const MAX_POSITION = 1e6; // position at the right end of the plot of the memory
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
  /** Tokens per second at the top of the plot. It only grows, so the line does not jump. */
  axis = 0;

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
    const point = { from: this.#from, to: position, ms: this.#ms };
    this.points.push(point);
    this.axis = Math.max(this.axis, roundUp(1.6 * this.median));
    [this.#from, this.#ms] = [position, 0];
    if (this.points.length > MAX_POINTS) this.points = joined(this.points);
    return true;
  }

  /** What comes next is not measured with what came before: the text was edited. */
  cut() {
    this.#from = -1;
  }

  /** Tokens per second, as the median of the latest measurements; 0 before the first. */
  get median() {
    return median(this.points.slice(-4 * MEDIAN_RADIUS).map(rate));
  }

  clear() {
    this.points = [];
    this.axis = 0;
    this.cut();
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

/** Tokens a second of one measurement. @param {Point} point */
function rate(point) {
  return ((point.to - point.from) / point.ms) * 1000;
}

/** The next round number, 1, 2 or 5 times a power of ten. @param {number} value */
function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 2, 5].find((step) => step * power >= value) ?? 10) * power;
}

/**
 * Draws the measurements.
 * @param {HTMLCanvasElement} canvas @param {Speed} speed
 * @param {{ink: string, faint: string, line: string}} colours
 */
export function drawSpeed(canvas, speed, colours) {
  const { context, width, height } = sized(canvas);
  if (!context) return;
  const [bottom, top] = [18, 16];
  const far = roundUp(Math.max(1000, ...speed.points.map((p) => p.to)));
  const most = speed.axis || 100;
  const x = (/** @type {number} */ p) => (p / far) * width;
  const y = (/** @type {number} */ r) =>
    height - bottom - (Math.min(r, most) / most) * (height - bottom - top);
  context.clearRect(0, 0, width, height);
  frame(context, [y(0), y(most / 2), y(most)], width, colours.faint);
  write(context, colours.ink, [
    [speed.axis ? `${label(most)} tokens/s` : "tokens/s", 0, y(most) - 3, "left"],
    ["0", 0, height - 3, "left"],
    [`position ${label(far)}`, width, height - 3, "right"],
  ]);
  context.lineWidth = 2;
  context.lineJoin = "round";
  context.strokeStyle = colours.line;
  for (const run of runs(speed.points)) {
    context.beginPath();
    context.moveTo(x(run[0].from), y(rateAround(run, 0)));
    for (const [i, point] of run.entries()) context.lineTo(x(point.to), y(rateAround(run, i)));
    context.stroke();
  }
}

/**
 * Draws what this model needs at each position, and a growing cache: both axes are logarithmic.
 * @param {HTMLCanvasElement} canvas
 * @param {{fixed: number, perToken: number, position: number}} memory
 * @param {{ink: string, faint: string, line: string, other: string}} colours
 */
export function drawMemory(canvas, { fixed, perToken, position }, colours) {
  const { context, width, height } = sized(canvas);
  if (!context) return;
  const bottom = 16;
  const [least, most] = [perToken, perToken * MAX_POSITION].map(Math.log10);
  const x = (/** @type {number} */ p) => (Math.log10(Math.max(1, p)) / Math.log10(MAX_POSITION)) * width;
  const y = (/** @type {number} */ bytes) =>
    4 + (1 - (Math.log10(bytes) - least) / (most - least)) * (height - bottom - 8);
  const crossing = fixed / perToken;
  context.clearRect(0, 0, width, height);
  frame(context, [y(perToken)], width, colours.faint);
  context.lineWidth = 2;
  for (const [stroke, from, to] of /** @type {[string, number, number][]} */ ([
    [colours.other, perToken, perToken * MAX_POSITION],
    [colours.line, fixed, fixed],
  ])) {
    context.beginPath();
    context.moveTo(0, y(from));
    context.lineTo(width, y(to));
    context.strokeStyle = stroke;
    context.stroke();
  }
  for (const [fill, at, bytes] of /** @type {[string, number, number][]} */ ([
    [colours.other, position, perToken * Math.max(1, position)],
    [colours.line, position, fixed],
  ])) {
    context.beginPath();
    context.arc(Math.min(width - 4, Math.max(4, x(at))), y(bytes), 4, 0, 2 * Math.PI);
    context.fillStyle = fill;
    context.fill();
  }
  context.setLineDash([2, 3]);
  context.beginPath();
  context.moveTo(x(crossing), y(fixed));
  context.lineTo(x(crossing), height - bottom);
  context.strokeStyle = colours.ink;
  context.lineWidth = 1;
  context.stroke();
  context.setLineDash([]);
  write(context, colours.ink, [
    ["1", 0, height - 3, "left"],
    [`a cache overtakes at ${label(crossing)}`, x(crossing), height - 3, "center"],
    ["1 M", width, height - 3, "right"],
  ]);
}

/**
 * @param {CanvasRenderingContext2D} context @param {number[]} lines @param {number} width
 * @param {string} colour
 */
function frame(context, lines, width, colour) {
  context.strokeStyle = colour;
  context.lineWidth = 1;
  for (const line of lines) {
    context.beginPath();
    context.moveTo(0, Math.round(line) + 0.5);
    context.lineTo(width, Math.round(line) + 0.5);
    context.stroke();
  }
}

/**
 * @param {CanvasRenderingContext2D} context @param {string} colour
 * @param {[string, number, number, string][]} texts
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
function rateAround(run, at) {
  return median(run.slice(Math.max(0, at - MEDIAN_RADIUS), at + MEDIAN_RADIUS + 1).map(rate));
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
  return Math.round(value).toLocaleString("en");
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
