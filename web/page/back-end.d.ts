/**
 * What the page needs of a model. `backend-worker.js` computes it in the browser, `backend-server.js` asks a
 * server.
 */

export interface BackEnd {
  describe(): Description;
  /** The tokens of a text and what each adds to it. Raises an error for a text that cannot be encoded. */
  tokenize(text: string): Promise<{ ids: number[]; texts: string[] }>;
  /** A new stream at position 0. */
  start(): Promise<Handle>;
  /** The streams that already exist; `note` is what the page remembered of their text. */
  list(): Promise<{ handle: Handle & { id: string }; note: unknown }[]>;
  /** A stream from a file that `save` wrote. */
  load(file: Uint8Array): Promise<{ handle: Handle; note: unknown }>;
  /** Keeps the text of a stream for the next time the page is opened. Optional. */
  remember?(handle: Handle, note: unknown): void;
  /** Deletes a stream while the page is being closed. Optional. */
  forget?(handle: Handle): void;
  /** Replays the reference answers of the artefact. Only in a browser. */
  check?(): Promise<{ passed: boolean; sentence: string; seconds: number }>;
  /** What the server does now, in short lines. Only on a server. */
  status?(): Promise<{ lines: string[]; note: string }>;
}

/** A stream of the model: it has seen `position` tokens. Only the page that holds it changes it. */
export interface Handle {
  readonly position: number;
  /** Whether the prediction of the next token is known; false after loading a file of another program. */
  readonly predicts: boolean;
  /** Why the last `generate` ended. */
  readonly ended: "end" | "length" | "stopped" | null;
  /** Feeds tokens; returns their surprisals in bits, NaN where nothing came before. */
  append(ids: number[], options?: { signal?: AbortSignal }): Promise<number[]>;
  /** Feeds the prompt, then yields tokens. However it ends, the stream has seen every token it yielded. */
  generate(
    prompt: number[],
    options: Sampling & { max_tokens: number; seed: number; signal?: AbortSignal },
  ): AsyncGenerator<{ token: number; text: string; bits: number }>;
  /** Takes back tokens, so that `last` is the latest one. Returns false, without a change, if it cannot. */
  rewind(count: number, last: number | undefined): Promise<boolean>;
  restart(): Promise<void>;
  fork(): Promise<Handle>;
  save(note: unknown): Promise<Blob>;
  dispose(): Promise<void>;
  /** The likeliest tokens at a position, with their bits. Only on a server. */
  likeliest?(position: number): { text: string; bits: number }[] | null;
}

/** Settings of the sampler. The page shows three; what else a model recommends is passed on. */
export interface Sampling {
  temperature?: number;
  /** 0 is all tokens. */
  top_k?: number;
  top_p?: number;
  [setting: string]: number | undefined;
}

export interface Description {
  name: string;
  models: string[];
  /** A line about the model for those who know what its words mean. */
  facts: string;
  /** What its tokens are, such as "words and parts of words". */
  tokens: string;
  /** How many of them training read; null if that is unknown. */
  trainedTokens: number | null;
  parameters: number | null;
  /** Where it computes, and who sees what is typed: "on this server". */
  where: string;
  /** How the texts begin that the page writes by itself; empty if the model begins. */
  openings: string[];
  concern: string | null;
  special: Record<string, number | undefined>;
  /** The names of the tokens, for vocabularies of ids. */
  names: string[] | null;
  bytesPerStream: number;
  /** What a cache of all keys and values would grow by with each token. */
  bytesPerToken: number;
  /** The address of the documentation, if the page is part of a site. */
  manual?: string;
  /** The artefact's own defaults. */
  sampling: Sampling;
}
