/** A small organ in a church, as in examples/music/sound.py: notes that are scheduled ahead of the clock. */

const PARTIALS = [1, 0.55, 0.26, 0.22, 0.07, 0.1, 0.03, 0.06];
const PLACES = [0.35, 0.62, 0.4, 0.55]; // of the voices from the top: 0 is left and 1 is right
const LOUDNESS = [1, 0.82, 0.86, 1.1];
const [ATTACK, RELEASE] = [0.045, 0.16]; // seconds
const [ECHO_SECONDS, ECHO_SHARE] = [2.2, 0.3];
const GAIN = 0.2;

export class Organ {
  /** @param {number} volume 0 to 1 @param {AudioContext} context that sounds */
  constructor(volume, context = new AudioContext({ latencyHint: "playback" })) {
    this.context = context;
    this.out = this.context.createGain();
    this.out.gain.value = volume;
    const bound = this.context.createDynamicsCompressor();
    const room = this.context.createConvolver();
    room.normalize = false;
    room.buffer = echo(this.context);
    this.dry = this.context.createGain();
    this.dry.connect(bound);
    this.dry.connect(room);
    room.connect(bound);
    bound.connect(this.out);
    this.out.connect(this.context.destination);
    this.places = PLACES.map((place) => {
      const panner = this.context.createStereoPanner();
      panner.pan.value = 2 * place - 1;
      panner.connect(this.dry);
      return panner;
    });
    /** @type {Set<{end: (at: number) => void}>} */
    this.sounding = new Set();
    /** @type {Map<number, PeriodicWave>} */
    this.waves = new Map();
  }

  /** Seconds on the clock of the sound card. */
  get now() {
    return this.context.currentTime;
  }

  /** @param {number} volume */
  set volume(volume) {
    this.out.gain.setTargetAtTime(volume, this.now, 0.02);
  }

  /**
   * Lets a note begin at a time on the clock; it sounds until its `end`.
   * @param {{voice: number, pitch: number, from: number}} note
   * @returns {{end: (at: number) => void}}
   */
  begin({ voice, pitch, from }) {
    const frequency = 440 * 2 ** ((pitch - 69) / 12);
    const pipe = this.context.createOscillator();
    pipe.setPeriodicWave(this.#wave(pitch, frequency));
    pipe.frequency.value = frequency;
    const air = this.context.createGain();
    air.gain.setValueAtTime(0, from);
    air.gain.setTargetAtTime((GAIN * LOUDNESS[voice]) / 2, from, ATTACK / 3);
    pipe.connect(air).connect(this.places[voice]);
    pipe.start(from);
    const tone = {
      end: (/** @type {number} */ at) => {
        air.gain.cancelScheduledValues(Math.max(at, from));
        air.gain.setTargetAtTime(0, Math.max(at, from), RELEASE / 4);
        pipe.stop(Math.max(at, from) + 2 * RELEASE);
      },
    };
    this.sounding.add(tone);
    pipe.onended = () => {
      this.sounding.delete(tone);
      air.disconnect();
    };
    return tone;
  }

  /** Ends all notes, those that were scheduled too. */
  hush() {
    for (const tone of this.sounding) tone.end(this.now);
  }

  async resume() {
    if (this.context.state !== "running") await this.context.resume();
  }

  /**
   * One period of a pipe: high pipes have weaker partials.
   * @param {number} pitch @param {number} frequency
   */
  #wave(pitch, frequency) {
    let wave = this.waves.get(pitch);
    if (!wave) {
      const sines = PARTIALS.map(
        (amplitude, i) => amplitude * Math.min(1, (2400 / (frequency * (i + 1))) ** 0.7),
      );
      wave = this.context.createPeriodicWave(
        new Float32Array(sines.length + 1),
        Float32Array.of(0, ...sines),
        {
          disableNormalization: true,
        },
      );
      this.waves.set(pitch, wave);
    }
    return wave;
  }
}

/**
 * The answer of the room: decaying noise, different on both sides, dull like stone.
 * @param {AudioContext} context
 */
function echo(context) {
  const length = Math.round(ECHO_SECONDS * context.sampleRate);
  const buffer = context.createBuffer(2, length, context.sampleRate);
  const dull = Math.exp((-2 * Math.PI * 2500) / context.sampleRate);
  for (let side = 0; side < 2; side++) {
    const samples = buffer.getChannelData(side);
    let low = 0;
    let power = 0;
    for (let i = 0; i < length; i++) {
      const noise = (Math.random() * 2 - 1) * Math.exp((-6.9 * i) / length) * Math.min(1, (50 * i) / length);
      low = dull * low + (1 - dull) * noise;
      samples[i] = low;
      power += low * low;
    }
    const scale = ECHO_SHARE / Math.sqrt(power);
    for (let i = 0; i < length; i++) samples[i] *= scale;
  }
  return buffer;
}
