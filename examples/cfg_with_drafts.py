"""Guidance with a drafter: transformers silently changes the text, mmdecode does not."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from mmdecode import Decoder

set_seed(0)
sizes = {"vocab_size": 80, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
config = LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.4, eos_token_id=None)
model, prompt = LlamaForCausalLM(config).eval(), torch.tensor([[5, 9, 5, 9, 5, 9, 5]])
options = {"guidance_scale": 1.8, "max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
alone = model.generate(prompt, **options)
theirs = model.generate(prompt, **options, prompt_lookup_num_tokens=5)
ours = model.generate(prompt, **options, custom_generate=Decoder(draft="lookup:length=5"))
print("guidance_scale with prompt_lookup_num_tokens, same text:", torch.equal(alone, theirs))
print("guidance_scale with mmdecode's prompt lookup, same text:", torch.equal(alone, ours))
