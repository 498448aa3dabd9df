"""Replacing modules, functions and classes in the program's own process. The evaluator imports none of it."""

from __future__ import annotations

from evaluators.results import Outcome
from tests.attacks.attack import Attack, program

THEME = "imports_and_patches"
SCORED = (Outcome.SCORED,)

ATTACKS = (
    Attack(
        name="modules_in_the_working_folder",
        theme=THEME,
        property="a torch.py, json.py or sitecustomize.py in the working folder is imported by nobody",
        source=program("""
            import importlib, site
            names = ("torch", "json", "safetensors", "evaluators", "forge_kernels", "sitecustomize", "usercustomize")
            folders = (".", os.path.expanduser("~"), site.getusersitepackages(), "@CWD@", "@HOME@")
            for folder in folders:
                tried(lambda: os.makedirs(folder, exist_ok=True))
                for name in names:
                    if folder not in ("@CWD@", "@HOME@"):
                        tried(lambda: open(f"{folder}/{name}.py", "w").write("raise SystemError('imported')"))
                tried(lambda: open(f"{folder}/@MARK@.pth", "w").write("import os; os._exit(3)"))
            for key in [key for key in sys.modules if key.split(".")[0] == "json"]:
                del sys.modules[key]
            import json
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        needs_isolation=True,
    ),
    Attack(
        name="patched_torch",
        theme=THEME,
        property="functions of torch and forge_kernels that a program replaces do not change how it is checked and scored",
        source=program("""
            import forge_kernels, forge_kernels.ops.decode, forge_kernels.ops.encode
            import torch.nn.functional as functional
            codes = {layer.name: encode(session.weight(layer)) for layer in session.layers}
            for name in ("equal", "isfinite", "allclose", "matmul", "sort"):
                setattr(torch, name, lambda *_, **__: torch.ones((), dtype=torch.bool))
            functional.cross_entropy = lambda *_, **__: torch.zeros(())
            functional.linear = lambda x, w, b=None: x @ w.mT
            torch.Tensor.isfinite = lambda self: torch.ones_like(self, dtype=torch.bool)
            torch.manual_seed = lambda seed: None
            for module in (forge_kernels, forge_kernels.ops.decode):
                module.decode = lambda encoded: None
            for name, encoded in codes.items():
                session.install(name, encoded)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
    ),
    Attack(
        name="patched_session",
        theme=THEME,
        property="a session that only claims to install installs nothing",
        source=program("""
            class Claims(type(session)):
                def install(self, *_, **__): return None
                def gate_loss(self): return 0.0
                def output_error(self, *_, **__): return 0.0
            session.__class__ = Claims
            honest(session)
            session.log(f"gate loss {session.gate_loss()}")
        """),
        outcomes=(Outcome.CONTRACT,),
        reason="not every layer is installed",
    ),
    Attack(
        name="forged_traces",
        theme=THEME,
        property="evidence is what trusted code saw: calls that were only claimed are not in it, hidden ones are",
        source=program("""
            session.events = [{"op": "gate_loss", "index": 0}]
            for name in ("evidence", "events", "trace", "QUANTFORGE_TRACE"):
                print('{"op": "gate_loss", "index": 0}')
                setattr(session, name, [])
            sys.settrace(None)
            sys.setprofile(None)
            session.second_moment("blocks.0.qkv")
            type(session).second_moment = lambda self, *_, **__: None
            session.second_moment("blocks.1.qkv")
            honest(session)
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: (
            []
            if [event["op"] for event in result.evidence.events]
            == ["second_moment"] + ["weight", "install"] * len(evaluator.subject.map.layers)
            and result.evidence.events[0]["group"] == "blocks.0.qkv"
            else [f"the events are {[event['op'] for event in result.evidence.events]}"]
        ),
        quick=True,
    ),
    Attack(
        name="lying_objects",
        theme=THEME,
        property="layers, encodings, rules and tensors of classes that lie are judged by what they hold",
        source=program("""
            import dataclasses
            from evaluators.errors import ContractError
            class Loud(torch.Tensor):
                @classmethod
                def __torch_function__(cls, function, types, args=(), kwargs=None):
                    result = super().__torch_function__(function, types, args, kwargs or {})
                    return True if function is torch.equal else result
            class Wide(Encoded):
                num_bits = 0.0
            class Rule(ActivationRule):
                table = torch.randn(64, 64)
            class Text(str):
                __eq__ = lambda self, other: True
                __hash__ = str.__hash__
            for layer in session.layers:
                lying = dataclasses.replace(layer, num_inputs=32, num_outputs=1, group="blocks.9.qkv")
                encoded = encode(session.weight(lying))
                given = Wide(codes_NK=encoded.codes_NK.as_subclass(Loud), scales_NB=encoded.scales_NB)
                for rule in (Rule(scale_rule=Text("table")), ActivationRule(code_rule=Text("reference"))):
                    try:
                        session.install(lying, given, activation=rule)
                        session.log("an unknown rule passed")
                    except ContractError:
                        pass
                session.install(lying, given, activation=Rule())
        """),
        outcomes=SCORED,
        scores_as_honest=True,
        check=lambda world, evaluator, result: [result.program_log] if "passed" in result.program_log else [],
    ),
    Attack(
        name="patched_interpreter",
        theme=THEME,
        property="a program that replaces the exit and the codec of the channel ends as what it did",
        source=program("""
            import builtins, json
            from evaluators import transport, worker
            os._exit = lambda code: None
            json.dumps = lambda *_, **__: '{"body": {"op": "scored", "args": {"nll": 0.0}}, "tensors": []}'
            transport.Arena.write = lambda self, tensors: []
            builtins.isinstance = lambda *_: True
            honest(session)
        """),
        outcomes=(Outcome.CONTRACT, Outcome.CRASHED),
    ),
)  # fmt: skip
