/**
 * Tokens a second over the position in the stream: measured in short windows, kept in constant memory, drawn.
 */

const WINDOW = 200; // milliseconds of work in one measurement
const MOST = 400; // measurements; then neighbours are joined

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
  #last = 0;

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
    if (this.#ms < WINDOW || position <= this.#from) return false;
    const point = { from: this.#from, to: position, ms: this.#ms };
    this.points.push(point);
    this.#last = rate(point);
    [this.#from, this.#ms] = [position, 0];
    if (this.points.length > MOST) this.points = joined(this.points);
    return true;
  }

  /** What comes next is not measured with what came before: the text was edited. */
  cut() {
    this.#from = -1;
  }

  /** The latest tokens a second. */
  get last() {
    return this.#last;
  }

  clear() {
    this.points = [];
    this.#last = 0;
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
  return halved.length > MOST ? halved.slice(-MOST / 2) : halved;
}

/** Tokens a second of one measurement. @param {Point} point */
export function rate(point) {
  return ((point.to - point.from) / point.ms) * 1000;
}

/** The next round number, 1, 2 or 5 times a power of ten. @param {number} value */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 2, 5].find((step) => step * power >= value) ?? 10) * power;
}

/**
 * Draws the measurements.
 * @param {HTMLCanvasElement} canvas
 * @param {Speed} speed
 * @param {{ink: string, faint: string, line: string, fill: string}} colours
 */
export function drawSpeed(canvas, speed, colours) {
  const { context, width, height } = sized(canvas);
  if (!context) return;
  const [left, bottom, top, right] = [4, 18, 16, 4];
  context.clearRect(0, 0, width, height);
  const points = speed.points;
  const low = points.length ? Math.min(...points.map((p) => p.from)) : 0;
  const far = points.length ? Math.max(...points.map((p) => p.to)) : 1000;
  const most = roundUp(Math.max(1, ...points.map(rate)) * 1.05);
  const x = (/** @type {number} */ p) => left + ((p - low) / Math.max(1, far - low)) * (width - left - right);
  const y = (/** @type {number} */ r) => height - bottom - (r / most) * (height - bottom - top);
  context.font = "11px system-ui, sans-serif";
  context.strokeStyle = colours.faint;
  context.fillStyle = colours.ink;
  context.lineWidth = 1;
  for (const share of [0, 0.5, 1]) {
    const line = Math.round(y(most * share)) + 0.5;
    context.beginPath();
    context.moveTo(left, line);
    context.lineTo(width - right, line);
    context.stroke();
  }
  context.textBaseline = "bottom";
  context.textAlign = "left";
  context.fillText(`${label(most)} tokens/s`, left, y(most) - 2);
  context.textBaseline = "top";
  context.fillText(`position ${label(low)}`, left, height - bottom + 5);
  context.textAlign = "right";
  context.fillText(label(far), width - right, height - bottom + 5);
  if (!points.length) return;
  context.lineWidth = 1.75;
  context.lineJoin = "round";
  for (const run of runs(points)) {
    context.beginPath();
    for (const [i, point] of run.entries()) {
      const at = /** @type {const} */ ([x((point.from + point.to) / 2), y(rate(point))]);
      if (i === 0) context.moveTo(...at);
      else context.lineTo(...at);
    }
    if (run.length === 1) context.lineTo(x(run[0].to) + 1, y(rate(run[0])));
    context.strokeStyle = colours.line;
    context.stroke();
    context.lineTo(x((run[run.length - 1].from + run[run.length - 1].to) / 2), y(0));
    context.lineTo(x((run[0].from + run[0].to) / 2), y(0));
    context.fillStyle = colours.fill;
    context.fill();
  }
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
 * The drawing context of a canvas whose pixels are those of the screen, and its size in CSS pixels.
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
