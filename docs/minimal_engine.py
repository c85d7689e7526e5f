"""An engine without mone-ref: the protocol of docs/protocol.md in the standard library and numpy.

Its models know nothing, so every token is equally likely; its layers rewrite routes as they should.
"""

import itertools
import json
import os
import traceback

import numpy as np
from safetensors.numpy import load_file, save_file

REQUESTS = os.fdopen(int(os.environ["MONE_REF_READ_FD"]), "rb")
ANSWERS = os.fdopen(int(os.environ["MONE_REF_WRITE_FD"]), "wb", buffering=0)
numbers, sessions = itertools.count(1), {}


class Refused(Exception):
    pass


def start(request):
    os.chdir(request["exchange"])  # tensor files are named relative to it
    engine = {"name": "minimal", "version": "1", "device": "cpu", "features": ["lora"]}
    engine["compute"] = {"float32": "float32"}
    return {"protocol": 1, "engine": engine, "abilities": ["build_layer"]}


def load(request):
    if request["options"]["features"]:
        raise Refused("UNSUPPORTED/feature", "init", "this engine has no LoRA")
    with open(os.path.join(request["checkpoint"], "config.json")) as file:
        return opened(json.load(file)["vocab_size"])


def score(request):
    vocab = sessions[request["session"]]
    rows = {
        f"logprobs.{index}": np.full((len(prompt), vocab), -np.log(vocab), np.float32)  # [T, V]
        for index, prompt in enumerate(request["prompts"])
    }
    return saved(request, rows)


def build_layer(request):
    layer, tensors = request["layer"], load_file(request["tensors"])
    experts, path = layer["num_logical_experts"], layer["path"]
    substituted = layer["declared"].get(str(layer["layer"]), [])
    rows = np.zeros(experts, np.int64)  # [E], row 0 for substituted experts
    constants = np.zeros((experts, max(layer["hidden_size"], layer["activation_size"])), np.float32)
    for row, expert in enumerate(e for e in range(experts) if e not in substituted):
        rows[expert] = row
    for expert in substituted:
        constants[expert, : layer["hidden_size"]] = tensors[f"{path}.{expert}.approx_value"]
    return opened((np.isin(range(experts), substituted), rows, constants), ["rewrite_routes"])


def rewrite_routes(request):
    substituted, rows, constants = sessions[request["session"]]
    given = load_file(request["tensors"])
    weights, ids = given["topk_weights"], given["topk_ids"]  # [T, K]
    known = (ids >= 0) & (ids < len(rows))
    ids = np.where(known, ids, 0)
    paid, kept = known & substituted[ids], known & ~substituted[ids]
    terms = np.where(paid[:, :, None], weights[:, :, None] * constants[ids], 0)  # [T, K, H]
    answer = {"weights": np.where(kept, weights, 0), "rows": np.where(kept, rows[ids], 0)}
    return saved(request, {**answer, "constants": terms.sum(axis=1, dtype=np.float32)})


def close(request):
    del sessions[request["session"]]
    return {}


def stop(request):
    return {}


def opened(session, abilities=()):
    number = next(numbers)
    sessions[number] = session
    return {"session": number, "abilities": list(abilities)}


def saved(request, tensors):
    name = f"{request['seq']}.out"
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, name)
    return {"tensors": name}


COMMANDS = {
    command.__name__: command
    for command in (start, load, score, build_layer, rewrite_routes, close, stop)
}


def answer(request):
    try:
        return {"answer": "ok", **COMMANDS[request["command"]](request)}
    except Refused as refusal:
        code, phase, words = refusal.args
        return {"answer": "refused", "evidence": [words], "phase": phase, "codes": [code]}
    except Exception as error:
        return {"answer": "failed", "evidence": f"{error!r}\n{traceback.format_exc()}"}


def send(request, message):
    ANSWERS.write(json.dumps({"seq": request["seq"], **message}).encode() + b"\n")


if __name__ == "__main__":
    for line in REQUESTS:
        request = json.loads(line)
        send(request, answer(request))
        if request["command"] == "stop":
            break
