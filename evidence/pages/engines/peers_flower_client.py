"""Flower's client: the adapter arrives and leaves as PEFT's state dict; the model is built once a worker process.

A module of its own, which Ray's workers import: what lives in a script's ``__main__`` would be sent with
every message.
"""

from __future__ import annotations

import time
from functools import cache

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peers_common import Plan, build_model, train
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict

app = ClientApp()


@cache
def load_worker(folder: str, dtype: str, attention: str, threads: int) -> tuple[Plan, PeftModel]:
    """Data and model of this process."""
    torch.set_num_threads(threads)
    plan = Plan(folder)
    return plan, build_model(plan, getattr(torch, dtype), attention)


@app.train()
def fit(message: Message, context: Context) -> Message:
    """One client's round."""
    config = message.content["config"]
    plan, model = load_worker(config["plan"], config["dtype"], config["attention"], config["threads"])
    client = int(context.node_config["partition-id"])
    set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())
    batches = plan.batches(client, int(config["round"]))
    began = time.perf_counter()
    total, count = train(model, plan, batches)
    metrics = {
        "num-examples": count,
        "loss": total / count,
        "seconds": time.perf_counter() - began,
    }
    content = {"arrays": ArrayRecord(get_peft_model_state_dict(model)), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)
