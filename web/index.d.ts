/**
 * Runs artefacts of xl-export: language models, and any other step with memory, whose cost per token stays
 * constant.
 */

/** A mistake that a user can fix; the message is one sentence that says how. */
export class XLExportError extends Error {}

/**
 * The model at an address: a URL, in Node also the path of a folder, or the artefact's files by name. Every
 * file that is read is verified by its size and SHA-256.
 */
export function open(
  address: string | URL | Record<string, Uint8Array | Blob>,
  options?: OpenOptions,
): Promise<Model>;

/** The text of a sequence of tokens. */
export function decode(vocabulary: Vocabulary, tokens: Iterable<number>): string;

export interface OpenOptions {
  /**
   * `wasm`, `webgpu`, or `native` (onnxruntime-node). `auto` takes onnxruntime-node in Node where it is
   * installed, WebGPU where the artefact was exported for it and the page has an adapter, and WebAssembly
   * otherwise.
   */
  device?: "auto" | "wasm" | "webgpu" | "native";
  /**
   * Threads of the computation; 1 by default. A page needs two headers for more, see `Facts.threadsReason`.
   */
  threads?: number;
  /** Hears how many bytes were read, of the artefact and of ONNX Runtime. */
  onProgress?: (progress: Progress) => void;
  signal?: AbortSignal;
  /**
   * The folder with the files of onnxruntime-web and tokenizers, for pages without a bundler. By default they
   * are where npm or the bundler has put them.
   */
  vendor?: string | URL;
  /** Whether the model runs in a worker, so that the page stays responsive. False by default. */
  worker?: boolean;
  /** The only `Model.identity` that is accepted. */
  expectedIdentity?: string;
  /**
   * An Ed25519 public key, as the text of a PEM file: only an artefact whose `spec.json` was signed with its
   * private key is accepted. It needs a browser of 2025, and a page over HTTPS or from this machine.
   */
  publicKey?: string;
  /** False copies the memory in every step. It is there for comparisons. */
  inPlace?: boolean;
}

export interface Progress {
  file: string;
  loaded: number;
  total: number;
}

/** A text, or token ids. */
export type Prompt = string | ArrayLike<number>;

/** One segment of tokens: of one stream, or a row for each stream. */
export type Segment = ArrayLike<number> | ArrayLike<number>[];

export interface Model {
  /** The content of `spec.json` (docs/reference/format.md). */
  readonly spec: Spec;
  /** The identity of the artefact: the digest of its spec. */
  readonly identity: string;
  /** How the artefact recommends to draw tokens (`sampling.json`); `generate` does so by default. */
  readonly sampling: SamplingOptions;
  /** Raises an XLExportError if the artefact is no language model, and so does whatever needs tokens. */
  readonly vocabulary: Vocabulary;
  readonly facts: Facts;
  /** The memory of new streams, all at position 0. */
  start(batch?: number): Promise<Memory>;
  /**
   * Logits [batch, tokens, V] of the token after each token of a segment of at most `spec.rule.segment`
   * tokens.
   */
  step(tokens: Segment, memory: Memory): Promise<Logits>;
  /**
   * The outputs of a step that is no language model, by their names; ids are bigints. Each input has the
   * numbers of all rows and tokens, the last axis fastest; a shape that is given is checked.
   */
  step(inputs: Record<string, Numbers | Tensor<Numbers>>, memory: Memory): Promise<Record<string, Tensor>>;
  /** Logits [batch, V] of the token after the last one of a segment. */
  predict(tokens: Segment, memory: Memory): Promise<Logits>;
  /** Feeds a text of any length to one stream. Where it is stopped, the stream has seen a part of it. */
  feed(prompt: Prompt, memory: Memory, options?: { signal?: AbortSignal }): Promise<void>;
  /**
   * The surprisal of every token of a text of any length. For the first token it follows from what the
   * memory has seen; it is not a number where the memory is new, was loaded, or is left out.
   */
  score(prompt: Prompt, options?: ScoreOptions): Promise<Scores>;
  /**
   * Takes back the last tokens of a stream, up to one segment, counted from the furthest position that it
   * has reached. Only a ring can do that. What comes next is known again once a token is fed.
   */
  rewind(memory: Memory, count: number): Promise<void>;
  /**
   * Continues a text token by token. Afterwards, however it ended, the memory has seen the prompt and all
   * tokens that were yielded; where it was stopped or failed within the prompt, a part of the prompt. An
   * aborted signal raises an XLExportError with the name `AbortError`.
   *
   * The draws are as in Python's `xl-export generate` with the same seed:
   * `numpy.random.default_rng([seed, 0])`.
   */
  generate(prompt: Prompt, options?: GenerateOptions): AsyncGenerator<Piece, void, void>;
  /** The file of some streams (docs/reference/saved-streams.md), which Python's `load_memory` reads too. */
  saveMemory(memory: Memory): Promise<Uint8Array>;
  /**
   * The streams in a file that this or Python's `save_memory` wrote, of any artefact with the same
   * `spec.memory_identity`. A memory of another precision is converted. `adopt` also continues streams that
   * other weights computed, such as those before the model was fine-tuned; files that are saved later record
   * it.
   */
  loadMemory(file: Uint8Array | ArrayBuffer, options?: { adopt?: boolean }): Promise<Memory>;
  /** Replays the reference answers of the artefact on this device. */
  check(options?: { signal?: AbortSignal }): Promise<CheckReport>;
  /** Ends the session and frees what it holds. */
  close(): Promise<void>;
}

/** The memory of some streams. It belongs to the caller; a model reads and updates it. */
export interface Memory {
  readonly batch: number;
  /** The number of tokens that the first stream has seen. */
  readonly position: number;
  /** The position of each stream. */
  readonly positions: BigInt64Array;
  /** An independent fork of all streams. */
  copy(): Promise<Memory>;
  /** Starts a new text in one row; the others go on. */
  restart(row?: number): Promise<void>;
  /** Frees the buffers. */
  dispose(): Promise<void>;
}

export interface Tensor<Data = Float32Array | BigInt64Array> {
  data: Data;
  shape: number[];
}

export type Logits = Tensor<Float32Array>;

/** Numbers of a named input; ids may be bigints too. */
export type Numbers = ArrayLike<number> | BigInt64Array;

export interface ScoreOptions {
  /** A stream to continue; it has seen the text afterwards. A new one where it is left out. */
  memory?: Memory;
  unit?: "bits" | "nats";
  signal?: AbortSignal;
  onProgress?: (fed: number, total: number) => void;
}

export interface Scores {
  tokens: number[];
  unit: "bits" | "nats";
  /** NaN for a first token; 9999 nats, and never infinity, for one that cannot occur. */
  surprisals: Float64Array;
}

/**
 * How tokens are drawn (docs/reference/step.md, "Sampling"). A setting that is left out is the model's own
 * (`Model.sampling`), or else what is called the default here.
 */
export interface SamplingOptions {
  /** 0 is greedy; 1 by default. */
  temperature?: number;
  /** Only the k likeliest tokens are drawn from; null, the default, for all. */
  topK?: number | null;
  /** Only the fewest likeliest tokens with this total probability are drawn from; 1 by default. */
  topP?: number;
  /** Only tokens with at least this fraction of the highest probability are drawn from; 0 by default. */
  minP?: number;
  /** Divides positive logits of tokens of the prompt and of the text, and multiplies negative ones. */
  repetitionPenalty?: number;
  /** Subtracted from the logit of each token that was generated before; 0 by default. */
  presencePenalty?: number;
  /** Subtracted from the logit of a token for each time it was generated before; 0 by default. */
  frequencyPenalty?: number;
}

export interface GenerateOptions extends SamplingOptions {
  /** A stream to continue. With one that has seen tokens the prompt may be empty. */
  memory?: Memory;
  /** 256 by default; with Infinity something else must end the text. */
  maxTokens?: number;
  seed?: number;
  /** Strings that end the text. They are not part of it. */
  stop?: string | string[];
  /** False leaves the text of all pieces empty. */
  text?: boolean;
  signal?: AbortSignal;
  /**
   * With a worker: the milliseconds (16 by default) of work whose pieces come in one message. The worker is
   * ahead of the loop by up to that. After a `break` the memory has therefore also seen tokens that were
   * computed and not yielded; with 0 there are none.
   */
  batchMilliseconds?: number;
}

/** One generated token. */
export interface Piece {
  row: number;
  token: number;
  /**
   * What the token adds to the text. Text that may become a stop string is held back until that is decided.
   */
  text: string;
  /** With the last token, why the text ends: `end` of the document, a `stop` string, or its `length`. */
  ended: "end" | "stop" | "length" | null;
  /** The surprisal of the token (nats) under the model, whatever the temperature. */
  nats: number;
  /** The position in its stream that the token takes. */
  position: number;
  /** The time that its step and its drawing took. */
  milliseconds: number;
}

export interface Facts {
  device: string;
  /** Why it is not the device that was asked for; null if it is. */
  deviceReason: string | null;
  /** `in place`, `copied` or `GPU buffers`. */
  memory: string;
  /** Why the memory is copied; null if it is not. */
  memoryReason: string | null;
  threads: number;
  /** Why there are fewer threads than were asked for. */
  threadsReason: string | null;
  computedBy: string;
  /** The bytes of one stream, however long its text is. */
  bytesPerStream: number;
}

/**
 * Whether this device computes what the trained model computes. Differences are in nats; in a step that is no
 * language model they are of its outputs, absolute up to 1 and relative above. In a lower precision they are
 * relative to the root mean square of the output if that is below 1.
 */
export interface CheckReport {
  passed: boolean;
  maxDifference: number;
  tolerance: number;
  meanDifference: number;
  meanTolerance: number;
  tokens: number;
  seconds: number;
  computedBy: string;
  sentence: string;
}

export interface Vocabulary {
  readonly kind: "byte" | "char" | "word" | "subword" | "ids";
  /** The number of tokens. */
  readonly size: number;
  readonly special: SpecialTokens;
  /** The token ids of a text. */
  encode(text: string): number[];
  /** A new decoder, at the beginning of a text. */
  decoder(): Decoder;
}

/**
 * Decodes one stream: called with its tokens one by one, it returns the text that each of them settles. All
 * of these and then `rest()` are together the text of the tokens.
 */
export interface Decoder {
  (token: number): string;
  /**
   * The text that would follow if the stream ended here, such as U+FFFD for half a character.
   * @param half whether half a character at the end counts; true if not given
   */
  rest(half?: boolean): string;
  /** Reads tokens whose text is shown already, such as a prompt: what follows only continues it. */
  prime(tokens: Iterable<number>): void;
}

export interface SpecialTokens {
  end_of_document?: number;
  beginning?: number;
  unknown?: number;
  padding?: number;
  end_of_line?: number;
  first?: number;
}

/** One input or output of the graph; names stand for the sizes that vary. */
export interface TensorFacts {
  name: string;
  dtype: "int64" | "int32" | "float32" | "float16" | "int8";
  shape: (number | string)[];
  /** Of an input of ids in a step that is no language model: how many ids there are. */
  ids?: number;
  /** Of an input that is memory: the output that the next step reads in its place. */
  present?: string;
  /** Of a tensor that a step can do without: when it is needed. */
  when?: string;
}

/** Types of memory tensors; tensors of bytes have scales, which are float32 tensors of their own. */
export type MemoryType = "float32" | "float16" | "int8";

/** The fields of `spec.json` that this package reads, and those that people ask for. */
export interface Spec {
  schema: number;
  model: {
    positions: string;
    sublayers: string;
    layers: number;
    heads: number;
    head_dim: number;
    d_model: number;
    d_ff: number;
    vocab_size: number;
    cutoffs: number[];
    parameters: number;
  };
  rule: {
    mem_len: number;
    segment: number;
    mask: "same-length" | "full";
    include_self: boolean;
    clamp_len: number | null;
    initial_memory: "masked" | "zeros";
  };
  form: "ring" | "shift" | "hidden" | "own";
  storage: "external" | "single-file" | "ort" | "fused-ort";
  /** The promises that a traced module does not keep; `spec.json` lacks the field if it keeps all. */
  without: string[];
  /** The rows of every step, if they are fixed. Without `fixed_tokens`, its tokens are `rule.segment`. */
  fixed_rows?: number;
  /** If there are several graphs: the tokens of each. A step has 1 to `rule.segment` tokens. */
  fixed_tokens?: number[];
  moves_every?: number;
  /** About the first position at which a traced module has other answers to a text than near position 0. */
  drifts_from?: number;
  /** The change of a traced module's answers if each weight is rounded once more; absent if it is small. */
  rounding?: number;
  /** The mean change, where `rounding` is the largest. */
  mean_rounding?: number;
  /** The largest difference of a traced module in fp32 from the original loop of its model. */
  original_difference?: number;
  /** The longest text, in tokens, for which a traced module whose memory was cut equals its model. */
  equals_up_to?: number;
  precision: string;
  memory_precision: string;
  target: string;
  opset: number;
  concern: string | null;
  /** The tokens that training read, repeated ones included; absent if they are unknown. */
  trained_tokens?: number;
  /** The largest and the mean difference from the reference, in nats, that `check` accepts. */
  tolerance: number;
  mean_tolerance: number;
  /** What decides whether the artefact continues a saved stream: two hashes. */
  memory_identity: { layout: string; weights: string };
  inputs: TensorFacts[];
  outputs: TensorFacts[];
  /** The inputs that are memory; `spec.json` has them among `inputs` only. */
  state: (TensorFacts & { present: string; dtype: MemoryType })[];
  files: Record<string, { sha256: string; num_bytes: number }>;
}
