// OpenAI's JavaScript client against a gateway: node openai_npm.mjs FOLDER URL. Prints one JSON object of what it got.
import { pathToFileURL } from "node:url";

const [folder, url] = process.argv.slice(2);
const { default: OpenAI } = await import(pathToFileURL(`${folder}/node_modules/openai/index.mjs`));
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "tandem_key", maxRetries: 0 });
const messages = [{ role: "user", content: "hi" }];
const found = {};

found.models = (await client.models.list()).data.map((model) => model.id);

const completion = await client.completions.create({ model: "", prompt: "a" });
found.completion = [completion.choices[0].text, completion.choices[0].finish_reason, completion.usage.total_tokens];

let text = "";
const calls = {};
const stream = await client.chat.completions.create({
  model: "", messages, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  if (chunk.usage) found.usage = chunk.usage.completion_tokens;
  for (const choice of chunk.choices) {
    text += choice.delta.content ?? "";
    for (const call of choice.delta.tool_calls ?? []) {
      const one = (calls[call.index] ??= { id: call.id, name: call.function.name, arguments: "" });
      one.arguments += call.function.arguments;
    }
    if (choice.finish_reason) found.finish = choice.finish_reason;
  }
}
found.text = text;
found.calls = Object.values(calls).map((call) => ({ ...call, arguments: JSON.parse(call.arguments) }));

const runner = client.chat.completions.stream({ model: "", messages });
const final = await runner.finalChatCompletion();
found.final = final.choices[0].message.tool_calls.length;

try {
  await client.completions.create({ model: "", prompt: "a", nonsense: 1 });
} catch (error) {
  found.error = [error.constructor.name, error.status, error.param, error.code];
}

const left = await client.chat.completions.create({ model: "", messages, stream: true });
for await (const _ of left) break;
console.log(JSON.stringify(found));
