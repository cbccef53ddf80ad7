"""The ops alone, in somebody else's stack: one decode step over their own cache, without transformers."""

import torch

from specdec_kernels import DraftTree, kv_compact_, philox_uniforms, tree_attention, verify_tree

BATCH, CAPACITY, NUM_LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM, VOCAB = 2, 64, 2, 8, 2, 64, 1000

torch.manual_seed(0)
tree = DraftTree.from_choices([[0], [1], [0, 0], [0, 1], [1, 0]])
prefix_len = torch.tensor([7, 12], dtype=torch.int32)
caches = [torch.randn(BATCH, CAPACITY, KV_HEADS, HEAD_DIM) for _ in range(2 * NUM_LAYERS)]

# Attention of the tree's nodes; K and V of node i were written to row prefix_len + i.
for layer in range(NUM_LAYERS):
    q = torch.randn(BATCH, tree.num_nodes, Q_HEADS, HEAD_DIM)
    keys, values = caches[2 * layer : 2 * layer + 2]
    out, lse = tree_attention(q, keys, values, tree.to_packed_mask()[None], prefix_len)

# Which path is accepted, exactly: row i of the logits is the target's prediction after node i.
logits = torch.randn(BATCH, tree.num_nodes, VOCAB) * 4
ids = torch.randint(VOCAB, (BATCH, tree.num_nodes))
ids[0, 1:] = logits[0, [0, 0, 1, 1, 2]].topk(2).indices[:, 0]  # a good draft for row 0
seed, temperature = torch.tensor([11, 12]), torch.tensor([0.0, 0.8])
uniforms = philox_uniforms(seed, prefix_len.long(), tree.num_nodes)
result = verify_tree(ids, tree.to_parents_tensor()[None], logits, None, temperature, uniforms)

# The accepted nodes' rows move behind the prefix, all layers in one call.
kv_compact_(caches, result.accepted, result.num_accepted, prefix_len)
prefix_len += result.num_accepted + 1
for row in range(BATCH):
    count = int(result.num_accepted[row])
    path, emitted = result.accepted[row, :count].tolist(), result.output_ids[row, : count + 1].tolist()
    print(f"row {row}: accepted nodes {path}, emitted ids {emitted}, {int(prefix_len[row])} rows in the cache")
