/** The memory of some streams, which the caller owns and a model reads and updates. */
import { XLExportError, shown } from "./errors.js";

const MOST_ROWS = 2 ** 16;
const TAIL_TOKENS = 16; // tokens of the first stream that are kept, from which its text continues

/** @typedef {import("./engine/session.js").Engine} Engine */

/** Frees the buffers of a memory that is no longer referenced. */
const forgotten = new FinalizationRegistry((/** @type {{engine: Engine, state: any}} */ { engine, state }) =>
  engine.release(state),
);

export class Memory {
  /**
   * @param {Engine} engine @param {any} state @param {string} owner the identity of the artefact
   * @param {BigInt64Array} positions
   */
  constructor(engine, state, owner, positions) {
    this.engine = engine;
    /** @type {any} */
    this.state = state;
    this.owner = owner;
    /** The stream position of each row's next token. A row whose position is set to 0n starts a new text. */
    this.positions = positions;
    /** @type {Float32Array | null} Logits [batch · V] after the last token; null before the first one. */
    this.last = null;
    /**
     * For each row, the hashes of the weights that computed its stream before other weights continued it,
     * with blanks between them.
     */
    this.adopted = Array.from(positions, () => "");
    /** Whether the tensors may hold values that are not finite. */
    this.unsure = false;
    this.busy = false;
    /** The largest position that the first stream has come to; see `Model.rewind`. */
    this.furthest = positions[0];
    /** @type {number[]} The latest tokens of the first stream. */
    this.tail = [];
    forgotten.register(this, { engine, state }, this);
  }

  get batch() {
    return this.positions.length;
  }

  /** The number of tokens that the first stream has seen. */
  get position() {
    return Number(this.positions[0]);
  }

  /** An independent fork of all streams. @returns {Promise<Memory>} */
  async copy() {
    return this.inUse(async () => {
      const copy = new Memory(
        this.engine,
        await this.engine.copy(this.state),
        this.owner,
        this.positions.slice(),
      );
      copy.last = this.last?.slice() ?? null;
      copy.unsure = this.unsure;
      copy.adopted = [...this.adopted];
      copy.tail = [...this.tail];
      copy.furthest = this.furthest;
      return copy;
    });
  }

  /** Starts a new text in one row. The others go on. @param {number} [row] */
  async restart(row = 0) {
    if (!Number.isInteger(row) || row < 0 || row >= this.batch) {
      throw new XLExportError(`row ${shown(row)} is not there; expected 0 to ${this.batch - 1}.`);
    }
    await this.inUse(async () => {
      this.positions[row] = 0n;
      if (row === 0) [this.tail, this.furthest] = [[], 0n];
      const size = (this.last?.length ?? 0) / this.batch;
      if (this.batch === 1) this.last = null;
      else this.last?.fill(NaN, row * size, (row + 1) * size);
    });
  }

  /** Notes the latest tokens of the first stream. @param {number[]} tokens */
  saw(tokens) {
    this.tail = [...this.tail, ...tokens].slice(-TAIL_TOKENS);
    if (this.positions[0] > this.furthest) this.furthest = this.positions[0];
  }

  /** Frees the buffers. The memory cannot be used afterwards. */
  async dispose() {
    if (!this.state) return;
    if (this.busy) refuseBusy();
    forgotten.unregister(this);
    this.engine.release(this.state);
    this.state = null;
  }

  /**
   * Lets nothing else use this memory until `leave`: two that share a stream would mix their texts. It tests
   * and takes at once, without an `await` during which another could come between.
   */
  take() {
    if (!this.state) throw new XLExportError("the memory was disposed of; take another one from start().");
    if (this.busy) refuseBusy();
    this.busy = true;
  }

  leave() {
    this.busy = false;
  }

  /**
   * Runs some work while nothing else may use this memory.
   * @template T @param {() => Promise<T>} work @returns {Promise<T>}
   */
  async inUse(work) {
    this.take();
    try {
      return await work();
    } finally {
      this.leave();
    }
  }
}

/** @returns {never} */
function refuseBusy() {
  throw new XLExportError("something else is using this memory; wait for it, or use a copy().");
}

/**
 * A memory of zeros for some new streams.
 * @param {Engine} engine @param {string} owner @param {number} batch
 */
export async function newMemory(engine, owner, batch) {
  if (!Number.isInteger(batch) || batch < 1 || batch > MOST_ROWS) {
    throw new XLExportError(`batch is ${shown(batch)}; expected 1 to ${MOST_ROWS} streams.`);
  }
  return new Memory(engine, await engine.create(batch), owner, new BigInt64Array(batch));
}

/**
 * Raises XLExportError unless a memory belongs to the model that is to use it.
 * @param {unknown} memory @param {Engine} engine @param {string} identity
 * @returns {asserts memory is Memory}
 */
export function refuseForeign(memory, engine, identity) {
  if (!(memory instanceof Memory)) {
    throw new XLExportError(`the memory is ${shown(memory)}; use one from start() or loadMemory().`);
  }
  if (memory.owner !== identity || memory.engine !== engine) {
    throw new XLExportError(
      `the memory belongs to ${memory.owner.slice(0, 12)} and this model is ${identity.slice(0, 12)}; use ` +
        "one that this model's start() returned.",
    );
  }
}
