"""Writes llama.cpp's logits as f32: MODEL TEXT WINDOW WINDOWS OUT; PyPI's llama_cpp, LLAMA_CPP_LIB_PATH as in 2026-11-21-gguf.

As `perplexity`: windows of tokens that begin with BOS, of each the logits of the second half but the last."""

import sys

import llama_cpp.llama_cpp as llama
import numpy

model, text, window, windows, out = sys.argv[1:]
window, text = int(window), open(text, "rb").read()
llama.llama_backend_init()
options = llama.llama_model_default_params()
options.use_extra_bufts = False
model = llama.llama_model_load_from_file(model.encode(), options)
vocab = llama.llama_model_get_vocab(model)
tokens = (llama.llama_token * len(text))()
count = llama.llama_tokenize(vocab, text, len(text), tokens, len(text), True, True)
options = llama.llama_context_default_params()
options.n_ctx = options.n_batch = options.n_ubatch = window
options.n_threads = options.n_threads_batch = 1
options.flash_attn_type = 0
with open(out, "wb") as file:
    for first in range(0, int(windows) * window, window):
        context = llama.llama_init_from_model(model, options)
        batch = llama.llama_batch_init(window, 0, 1)
        batch.n_tokens = window
        for i in range(window):
            batch.token[i] = tokens[first + i] if i else llama.llama_vocab_bos(vocab)
            batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = i, 1, 0, 1
        assert llama.llama_decode(context, batch) == 0
        for i in range(window // 2, window - 1):
            row = llama.llama_get_logits_ith(context, i)
            file.write(numpy.ctypeslib.as_array(row, (llama.llama_vocab_n_tokens(vocab),)).tobytes())
        llama.llama_free(context)
