/**
 * Questions and answers over a message port: numbered requests, events on the way, and errors as they were.
 */
import { StoppedError, XLExportError } from "../errors.js";

/**
 * @typedef {{postMessage(message: any, transfer?: any[]): void}} Port
 * @typedef {{name: string, message: string, stack?: string}} WireError
 * @typedef {{signal: AbortSignal, tell: (event: any) => void}} Context of a question
 */

/** An error as a message can carry it. @param {unknown} error @returns {WireError} */
export function packed(error) {
  if (!(error instanceof Error)) return { name: "Error", message: String(error) };
  const name = error instanceof XLExportError ? error.name : "Error";
  return { name, message: error.message, stack: error.stack };
}

/** The error that was packed. @param {WireError} wire */
export function unpacked({ name, message, stack }) {
  if (name === "AbortError") return new StoppedError();
  if (name === "XLExportError") return new XLExportError(message);
  const error = new Error(message);
  error.stack = stack;
  return error;
}

/** The error of a worker that answers no more. @param {string} why @param {string} [remedy] */
export function workerEnded(why, remedy = "open the model again") {
  return new XLExportError(`the worker of the model ended (${why}); ${remedy}.`);
}

/** The asking side. */
export class Asker {
  /** @param {Port} port */
  constructor(port) {
    this.port = port;
    this.count = 0;
    /**
     * @type {Map<number, {resolve: (value: any) => void, reject: (error: unknown) => void, hear?: (event:
     * any) => void}>}
     */
    this.open = new Map();
    /** @type {Error | null} */
    this.ended = null;
  }

  /**
   * The answer to a question.
   * @param {string} method @param {unknown} given
   * @param {{signal?: AbortSignal, hear?: (event: any) => void}} [options] `hear` is told events on the way
   * @returns {Promise<any>}
   */
  async ask(method, given, { signal, hear } = {}) {
    if (this.ended) throw this.ended;
    if (signal?.aborted) throw new StoppedError();
    const id = ++this.count;
    const stop = () => this.port.postMessage({ stop: id });
    signal?.addEventListener("abort", stop);
    try {
      return await new Promise((resolve, reject) => {
        this.open.set(id, { resolve, reject, hear });
        this.port.postMessage({ id, method, given });
      });
    } finally {
      this.open.delete(id);
      signal?.removeEventListener("abort", stop);
    }
  }

  /** @param {any} message */
  receive({ id, event, result, error }) {
    const asked = this.open.get(id);
    if (event !== undefined) asked?.hear?.(event);
    else if (error) asked?.reject(unpacked(error));
    else asked?.resolve(result);
  }

  /** Refuses all questions, the open ones and those to come. @param {Error} error */
  end(error) {
    this.ended ??= error;
    for (const { reject } of this.open.values()) reject(this.ended);
  }
}

/**
 * The answering side: calls `methods[method](given, {signal, tell})` for each question.
 * @param {Port} port
 * @param {Record<string, (given: any, context: Context) => Promise<any>>} methods
 * @returns {(message: any) => void} takes each message
 */
export function answering(port, methods) {
  /** @type {Map<number, AbortController>} */
  const running = new Map();
  return async ({ id, method, given, stop }) => {
    if (stop !== undefined) return running.get(stop)?.abort();
    const controller = new AbortController();
    running.set(id, controller);
    const tell = (/** @type {any} */ event) => port.postMessage({ id, event });
    try {
      const result = await methods[method](given, { signal: controller.signal, tell });
      port.postMessage({ id, result });
    } catch (error) {
      port.postMessage({ id, error: packed(error) });
    } finally {
      running.delete(id);
    }
  };
}
