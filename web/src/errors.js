/**
 * An error that a user can fix. Its message is one sentence that says what was given, what was expected and
 * how to fix it. Every other error of this package is a mistake of the package itself.
 */
export class XLExportError extends Error {
  /** @param {string} message @param {{cause?: unknown}} [options] */
  constructor(message, options) {
    super(message, options);
    this.name = "XLExportError";
  }
}

/** The error of a file that does not exist. */
export class MissingError extends XLExportError {}

/** The error of a step that was stopped by an AbortSignal; it has the name of the platform's own. */
export class StoppedError extends XLExportError {
  constructor() {
    super("the work was stopped by its signal; start it again with a signal that was not aborted.");
    this.name = "AbortError";
  }
}

/**
 * The first line of the message of another library's error, without a full stop and of bounded length.
 * @param {unknown} error
 */
export function firstLine(error) {
  const text = error instanceof Error ? error.message || error.name : String(error);
  const line = (text.trim().split("\n")[0] ?? "").replace(/\.$/, "");
  return line.length > 300 ? `${line.slice(0, 300)}…` : line || "no reason was given";
}

/**
 * Raises StoppedError if the signal was aborted.
 * @param {AbortSignal | undefined} signal
 */
export function refuseStopped(signal) {
  if (signal?.aborted) throw new StoppedError();
}

/**
 * A value for a message: short, and never more than one line.
 * @param {unknown} value
 */
export function shown(value) {
  let text;
  try {
    text = typeof value === "bigint" ? String(value) : (JSON.stringify(value) ?? String(value));
  } catch {
    text = String(value);
  }
  return text.length > 60 ? `${text.slice(0, 60)}…` : text;
}
