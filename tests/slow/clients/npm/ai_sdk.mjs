// Lets the AI SDK run a session of steps with a tool, which the server stores (the Responses API).
// Prints the text of the last answer, and the token counts of each step, as JSON.
// Usage: node ai_sdk.mjs URL MODEL STEPS
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const [url, model, most] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const run = tool({
  description: "Run a command",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => `ran ${command}`,
});
const { text, steps } = await generateText({
  model: openai.responses(model),
  tools: { run },
  stopWhen: stepCountIs(Number(most)),
  system: "You run commands. ".repeat(400),
  prompt: "Run ten steps.",
  providerOptions: { openai: { store: true } },
});
console.log(JSON.stringify({ text, steps: steps.map((step) => step.usage) }));
