// Balances a pole at a fixed rate with the exported policy. The model is in policy/, the module in src/.
import { open } from "./src/index.js";
import { Random } from "./src/text/random.js";

const PERIOD = 20; // milliseconds
const REMEMBERED = 16; // steps, to draw them
const element = (id) => document.getElementById(id);

/** CartPole-v1 of gymnasium. A seed begins where gymnasium's reset(seed=seed) does. */
class CartPole {
  constructor(seed) {
    const random = new Random(seed, 0);
    const start = Array.from({ length: 4 }, () => -0.05 + 0.1 * random.next());
    [this.x, this.xDot, this.theta, this.thetaDot] = start;
  }

  get upright() {
    return Math.abs(this.x) <= 2.4 && Math.abs(this.theta) <= (12 * 2 * Math.PI) / 360;
  }

  push(right) {
    const force = right ? 10 : -10;
    const [cosine, sine] = [Math.cos(this.theta), Math.sin(this.theta)];
    const temp = (force + 0.05 * (this.thetaDot * this.thetaDot) * sine) / 1.1;
    const turning = (9.8 * sine - cosine * temp) / (0.5 * (4 / 3 - (0.1 * (cosine * cosine)) / 1.1));
    const moving = temp - (0.05 * turning * cosine) / 1.1;
    this.x += 0.02 * this.xDot;
    this.xDot += 0.02 * moving;
    this.theta += 0.02 * this.thetaDot;
    this.thetaDot += 0.02 * turning;
  }

  copy() {
    return Object.assign(Object.create(CartPole.prototype), this);
  }
}

/** Whether the policy pushes the cart to the right; its memory moves on by one step. */
async function decide(model, world, memory) {
  const { action } = await model.step({ observation: [world.x, world.theta] }, memory);
  return action.data[1] > action.data[0];
}

/** The actions of one episode as 0 and 1, computed as fast as possible. */
async function play(model, seed, most = 500) {
  const memory = await model.start();
  const world = new CartPole(seed);
  let actions = "";
  while (world.upright && actions.length < most) {
    const right = await decide(model, world, memory);
    actions += right ? "1" : "0";
    world.push(right);
  }
  await memory.dispose();
  return actions;
}

function draw(world, past) {
  element("cart").setAttribute("transform", `translate(${world.x} 0)`);
  element("pole").setAttribute("transform", `rotate(${(world.theta * 180) / Math.PI})`);
  element("world").classList.toggle("fallen", !world.upright);
  const ghosts = element("ghosts").children;
  for (let age = 0; age < REMEMBERED; age++) {
    const seen = past[past.length - 1 - age];
    ghosts[age].setAttribute("stroke-opacity", seen ? 0.3 * (1 - age / REMEMBERED) : 0);
    if (seen) {
      ghosts[age].setAttribute("transform", `translate(${seen.x} 0) rotate(${(seen.theta * 180) / Math.PI})`);
    }
  }
}

async function run(model) {
  let seed = 0;
  let world = new CartPole(seed);
  let memory = await model.start();
  let past = []; // what the policy remembers, newest last
  let steps = 0;
  let times = [];
  let saved = null; // a moment, and the actions that followed while it is open
  let since = null; // how many actions after going back are as before: {same, of}
  const wishes = []; // of the reader, fulfilled between two steps
  const wish = (id, action) => element(id).addEventListener("click", () => wishes.push(action));

  const begin = async () => {
    world = new CartPole(++seed);
    await memory.restart(0);
    past = [];
    steps = 0;
  };
  const push = (by) => () => {
    world.thetaDot += by;
    if (saved) saved.open = false; // from here on other actions follow
    since = null;
  };
  wish("left", push(-0.7));
  wish("right", push(0.7));
  wish("new", () => {
    since = null;
    return begin();
  });
  wish("save", async () => {
    await saved?.memory.dispose();
    const copied = await memory.copy();
    saved = { world: world.copy(), memory: copied, past: [...past], steps, actions: [], open: true };
    since = null;
    element("back").disabled = false;
  });
  wish("back", async () => {
    await memory.dispose();
    world = saved.world.copy();
    memory = await saved.memory.copy();
    past = [...saved.past];
    steps = saved.steps;
    saved.open = false;
    since = { same: 0, of: 0 };
  });

  element("bytes").textContent = `${(model.facts.bytesPerStream / 1000).toFixed(1)} kB, at every step`;
  let due = performance.now();
  for (;;) {
    while (wishes.length) await wishes.shift()();
    if (element("forget").checked) {
      await memory.restart(0);
      past = [];
    }
    const began = performance.now();
    const right = await decide(model, world, memory);
    times = [...times.slice(-499), performance.now() - began];
    past = [...past.slice(1 - REMEMBERED), { x: world.x, theta: world.theta }];
    world.push(right);
    steps += 1;
    if (saved?.open) saved.actions.push(right);
    if (since && since.of < saved.actions.length) {
      since.same += saved.actions[since.of] === right ? 1 : 0;
      since.of += 1;
    }
    draw(world, past);
    if (steps % 10 === 0 || !world.upright) {
      const sorted = [...times].sort((a, b) => a - b);
      element("steps").textContent = `${(steps / 50).toFixed(1)} s, ${steps} steps`;
      element("latency").textContent =
        `${sorted[sorted.length >> 1].toFixed(2)} ms (slowest ${sorted.at(-1).toFixed(0)})`;
      element("replayed").textContent = since ? `${since.same} of ${since.of} actions as before` : "–";
    }
    if (!world.upright) {
      await new Promise((resolve) => setTimeout(resolve, 800));
      if (saved) saved.open = false;
      since = null;
      await begin();
      due = performance.now();
    }
    due = Math.max(due + PERIOD, performance.now()); // a late step does not make the next ones early
    await new Promise((resolve) => setTimeout(resolve, due - performance.now()));
  }
}

for (let age = 0; age < REMEMBERED; age++) {
  const ghost = document.createElementNS("http://www.w3.org/2000/svg", "line");
  ghost.setAttribute("y2", "-1");
  element("ghosts").append(ghost);
}
document.addEventListener("keydown", (event) => {
  if (event.key === "ArrowLeft") element("left").click();
  if (event.key === "ArrowRight") element("right").click();
});
try {
  const model = await open("policy", { vendor: "vendor/" });
  globalThis.page = { ready: true, play: (seed) => play(model, seed) };
  await run(model);
} catch (error) {
  element("error").hidden = false;
  element("error").textContent = error.message;
}
