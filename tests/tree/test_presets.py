"""The published trees, checked against what their origin implies."""

import hashlib
import json
from collections import Counter

import pytest

from specdec_kernels import DraftTree
from specdec_kernels.tree import preset, preset_names, preset_source
from specdec_kernels.tree.presets import _MEDUSA_PATHS

# From the published lists: nodes at depth 1, 2, 3, 4, and the hash of the list as JSON, so no path can change unseen.
PUBLISHED = {
    "mc_sim_7b_63": ((10, 28, 23, 2), "35c38d3c9cde7957"),
    "vicuna_7b_stage1_ablation": ((10, 21, 25, 7), "944fab219933cda3"),
    "vicuna_7b_stage1": ((10, 32, 20, 1), "7a9f647ee775c4d7"),
    "vicuna_7b_stage2": ((10, 23, 23, 7), "39fbc6f667c1b129"),
    "vicuna_13b_stage1": ((10, 29, 23, 1), "6df6cfc919a321cc"),
    "vicuna_13b_stage2": ((10, 19, 25, 9), "81755b321a66ed2c"),
    "vicuna_33b_stage1": ((10, 34, 19), "9db410c819cdbf94"),
    "vicuna_33b_stage2": ((10, 24, 24, 5), "22778f6a7b3d19d2"),
    "zephyr_stage2": ((10, 27, 23, 3), "a93cbb6a38c62726"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_trees(name):
    tree = preset(name)
    assert tree.num_nodes == 64
    counts = Counter(tree.depths)
    assert tuple(counts[depth] for depth in range(1, tree.max_depth + 1)) == PUBLISHED[name][0]
    assert max(tree.ranks) == 9
    listed = json.dumps([list(map(int, word)) for word in _MEDUSA_PATHS[name].split()])
    assert hashlib.sha256(listed.encode()).hexdigest()[:16] == PUBLISHED[name][1]
    assert "FasterDecoding/Medusa" in preset_source(name)
    assert "Apache-2.0" in preset_source(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_paths_are_listed_as_a_greedy_search_adds_them(name):
    """Heads are most often right with rank 0, so a search adds a path's prefix and its better siblings before it."""
    listed = {()}
    for word in _MEDUSA_PATHS[name].split():
        path = tuple(map(int, word))
        assert path not in listed
        assert path[:-1] in listed
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in listed
        listed.add(path)


def test_the_trees_differ():
    assert len({preset(name) for name in preset_names()}) == len(preset_names()) == len(PUBLISHED) + 8


def test_chains():
    assert preset("chain_0") == DraftTree.chain(0)
    assert preset("chain_5") == DraftTree.chain(5)
    assert preset("chain_100").num_nodes == 101
    assert preset_source("chain_5") == "this package"
    assert {"chain_1", "chain_8"} <= set(preset_names())


@pytest.mark.parametrize("name", ["", "nope", "chain_", "chain_-1", "chain_x", "chain_3 ", "MC_SIM_7B_63"])
def test_an_unknown_name_lists_the_known(name):
    with pytest.raises(ValueError, match=r"no tree is named .*mc_sim_7b_63, .*chain_8 and any chain_<n>"):
        preset(name)
    with pytest.raises(ValueError, match="no tree is named"):
        preset_source(name)
