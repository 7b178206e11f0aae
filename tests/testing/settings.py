"""Settings with which methods and codecs are quick; what is not listed is quick with its defaults."""

from dataclasses import replace

import fedveil as fv

CLEAR = 1e-3  # two passes of a forward difference differ by rounding, which the difference magnifies
TOFU = fv.TofuCodec(points=2, steps=3)
FEDSYNTH = fv.FedSynthCodec(batches=2, batch=2, epochs=1, fits=3)
FEDAGE = fv.FedAgeCodec(code="linear", block=8)
FEDLAP = fv.FedLap(images=1, passes=1, batches=2, batch=4, image_steps=1, steps=3, image_lr=1.0)

METHODS: dict[str, fv.Method] = {
    "baffle": fv.Baffle(directions=8),
    "baffle-epochs": fv.BaffleEpochs(directions=8),
    "fedsynth": fv.FedSynth(up=FEDSYNTH),
    "tofu": fv.Tofu(up=TOFU),
    "fedage": fv.FedAge(up=FEDAGE),
    "fedlap": FEDLAP,
    "feddm": fv.FedDm(images=1, batches=1, batch=6, draws=2, steps=3),
}
CODECS: dict[str, fv.Codec] = {
    "fedsynth": fv.FedSynthCodec(batches=2, batch=4, epochs=2, fits=100),
    "tofu": fv.TofuCodec(points=8, steps=200),
    "fedage": FEDAGE,
    "tiers": fv.Tiers(strong=fv.TopK(0.5), weak=fv.TopK(0.1)),
    "sketch": fv.Sketch(64),
}
SLOW = {"fedsynth", "tofu"}  # codecs that fit; as methods, with few steps, they are quick

DP = fv.DpSgd(noise=1.0, clip=1.0)
USERS = fv.UserLevel(noise=1.0, clip=1.0)
SECURE = fv.SecureSum(clip=16.0, bits=30)
VARIANTS: dict[str, fv.Method] = {
    "feedback and steps down": fv.FedAvg(up=fv.TopK(0.1), down=fv.Qsgd(), feedback=True),
    "no training": fv.FedSynth(up=replace(FEDSYNTH, objective="data")),
    "weights from the start": fv.FedAvg(down=FEDSYNTH),
    "adam and an average": fv.FedAvg(server=fv.ServerOptimizer("adam", 0.01, ema=0.9)),
    "a median": fv.FedAvg(aggregator=fv.Aggregator("median")),
    "full rounds": fv.FedAvg(up=fv.Qsgd(8), full_rounds=1),
    "private records": fv.FedAvg(privacy=DP),
    "private records, codes": fv.FedAvg(up=FEDAGE, privacy=DP),
    "private users": fv.FedAvg(user_privacy=fv.UserLevel(noise=1.0, clip=1.0, where="client")),
    "private sum": fv.FedAvg(user_privacy=USERS, secure=SECURE),
    "secure": fv.FedAvg(secure=SECURE),
    "secure, malicious": fv.FedAvg(secure=fv.SecureSum(clip=16.0, bits=30, server="malicious")),
    "secure codes": fv.FedAge(up=FEDAGE, secure=SECURE),
    "secure factors": fv.FedAvg(up=fv.PowerSgd(), feedback=True, secure=SECURE),
    "factors": fv.FedAvg(up=fv.PowerSgd(), feedback=True),
    "sketches": fv.FedAvg(up=fv.Sketch(64), down=fv.Sketch(64), feedback=True),
    "private sketches": fv.FedAvg(up=fv.Sketch(64), user_privacy=USERS, secure=SECURE),
    "compressed": fv.FedAvg(up=fv.Zstd(), down=fv.Zstd()),
    "controls in codes": fv.Scaffold(up=fv.Half(), down=fv.Half()),
    "private controls": fv.Scaffold(privacy=DP),
    "fair codes": fv.QFedAvg(up=FEDAGE),
    "dynamic, secure": fv.FedDyn(secure=SECURE),
    "replayed": fv.Baffle(directions=8, down="replay"),
    "local steps, replayed": fv.Baffle(directions=8, local=fv.LocalSteps(4, 4), down="replay"),
    "private surrogates": replace(FEDLAP, region="constant", weighting="equal", init="noise", privacy=DP),
}
ROUGH = {"baffle": CLEAR, "baffle-epochs": CLEAR, "replayed": CLEAR, "local steps, replayed": CLEAR}
