"""Throw-away: which cut of MiniLM loses least at equal bytes. One process, CUDA graphs."""
import sys, time, json, gzip, os, random
import torch, torch.nn as nn, torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
DEV = "cuda" if torch.cuda.is_available() else "cpu"
HERE = os.path.dirname(os.path.abspath(__file__))
torch.backends.cuda.matmul.allow_tf32 = True
W = {k: v.float() for k, v in load_file(HERE + "/minilm/model.safetensors").items()}
tok = Tokenizer.from_file(HERE + "/minilm/tokenizer.json"); tok.no_truncation(); tok.no_padding()
H, NL, NH = 384, 6, 12

def read(task, max_len, n_train, n_held):
    rows = {}
    for split in ("train", "dev"):
        with gzip.open(f"{HERE}/data/{task}_{split}.tsv.gz", "rt") as f:
            head = f.readline().rstrip("\n").split("\t")
            rows[split] = [dict(zip(head, l.rstrip("\n").split("\t"))) for l in f]
    def enc(rs):
        if task == "sst2":
            e = tok.encode_batch([r["sentence"] for r in rs]); lab = [int(r["label"]) for r in rs]
        else:
            e = tok.encode_batch([(r["question"], r["sentence"]) for r in rs]); lab = [int(r["label"] == "entailment") for r in rs]
        ids = torch.zeros(len(rs), max_len, dtype=torch.long); typ = torch.zeros_like(ids)
        for i, x in enumerate(e):
            a, t = x.ids[:max_len], x.type_ids[:max_len]
            if len(x.ids) > max_len: a[-1] = 102
            ids[i, :len(a)] = torch.tensor(a); typ[i, :len(a)] = torch.tensor(t)
        return ids.to(DEV), typ.to(DEV), torch.tensor(lab, device=DEV)
    r = random.Random(0); tr = rows["train"][:]; r.shuffle(tr)
    return enc(tr[n_held:n_held + n_train]), enc(rows["dev"]), enc(tr[:n_held])

class Layer(nn.Module):
    def __init__(s, i, drop):
        super().__init__()
        p = f"encoder.layer.{i}."
        def lin(n):
            l = nn.Linear(W[p+n+".weight"].shape[1], W[p+n+".weight"].shape[0]); l.weight.data.copy_(W[p+n+".weight"]); l.bias.data.copy_(W[p+n+".bias"]); return l
        def ln(n):
            l = nn.LayerNorm(H, 1e-12); l.weight.data.copy_(W[p+n+".weight"]); l.bias.data.copy_(W[p+n+".bias"]); return l
        s.q, s.k, s.v, s.o = (lin(n) for n in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"))
        s.n1, s.up, s.down, s.n2 = ln("attention.output.LayerNorm"), lin("intermediate.dense"), lin("output.dense"), ln("output.LayerNorm")
        s.drop = nn.Dropout(drop)
    def attend(s, x, m):
        B, S, _ = x.shape
        f = lambda l: l(x).view(B, S, NH, -1).transpose(1, 2)
        a = F.scaled_dot_product_attention(f(s.q), f(s.k), f(s.v), attn_mask=m)
        return s.n1(x + s.drop(s.o(a.transpose(1, 2).reshape(B, S, H))))
    def forward(s, x, m):
        x = s.attend(x, m)
        return s.n2(x + s.drop(s.down(F.gelu(s.up(x)))))

def q(x, bits):
    if bits >= 32: return x
    if bits == 1: return x.sign() * x.abs().mean(-1, keepdim=True)
    i = x.abs().argmax(-1, keepdim=True); top = x.gather(-1, i)
    sc = -(top / 2 ** (bits - 1)); sc = torch.where(sc == 0, torch.ones_like(sc), sc).bfloat16().float()
    best = None
    for sh in ((1.0, 0.9) if bits >= 4 else (1.0, 0.8)):
        c = (x / (sc * sh)).round().clamp(-2 ** (bits - 1), 2 ** (bits - 1) - 1) * (sc * sh)
        e = (c - x).square().sum(-1, keepdim=True)
        best = (c, e) if best is None else (torch.where(e < best[1], c, best[0]), torch.minimum(e, best[1]))
    return best[0]

class Wire(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, qf, qb): ctx.qb = qb; return qf(x)
    @staticmethod
    def backward(ctx, g): return ctx.qb(g), None, None

class Net(nn.Module):
    def __init__(s, v, drop=0.1):
        super().__init__(); s.v = v; e = "embeddings."
        emb = lambda n: nn.Embedding.from_pretrained(W[e+n+"_embeddings.weight"].clone(), freeze=False)
        s.we, s.pe, s.te = emb("word"), emb("position"), emb("token_type")
        s.ne = nn.LayerNorm(H, 1e-12); s.ne.weight.data.copy_(W[e+"LayerNorm.weight"]); s.ne.bias.data.copy_(W[e+"LayerNorm.bias"])
        s.layers = nn.ModuleList(Layer(i, drop) for i in range(NL)); s.drop = nn.Dropout(drop)
        s.pool = nn.Linear(H, H); nn.init.normal_(s.pool.weight, std=0.02); nn.init.zeros_(s.pool.bias)
        s.cls = nn.Linear(H, 2); nn.init.normal_(s.cls.weight, std=0.02); nn.init.zeros_(s.cls.bias)
    def embed(s, ids, typ):
        return s.drop(s.ne(s.we(ids) + s.pe.weight[:ids.shape[1]] + s.te(typ)))
    def bottom(s, ids, typ, m):
        x = s.embed(ids, typ)
        for l in s.layers[:s.v["layer"] + 1]: x = l(x, m)
        return x
    @torch.no_grad()
    def calibrate(s, ids, typ):
        v = s.v; L = v["layer"]; s.eval()
        if v["cut"] == "svd":
            U, S, V = torch.linalg.svd(s.layers[L].down.weight.data)
            r = v["r"]; s.V = nn.Parameter(V[:r].clone()); s.S = nn.Parameter(torch.diag(S[:r])); s.U = nn.Parameter(U[:, :r].clone()); s.layers[L].down.weight.requires_grad_(False); return
        m = (ids != 0)[:, None, None, :]
        x = s.bottom(ids, typ, m); keep = ids != 0; h = x[keep]
        s.mean = nn.Parameter(h.mean(0)); c = torch.cov((h - s.mean).T); r = v["r"]
        if v["cut"] == "balanced":
            with torch.enable_grad():
                n = min(256, len(x)); y = x[:n].clone().requires_grad_(); z = y
                for l in s.layers[L + 1:]: z = l(z, m[:n])
                p = s.pooled(z, ids[:n]); G = torch.zeros(H, H, device=DEV)
                for _ in range(24 if DEV == 'cuda' else 1):
                    g, = torch.autograd.grad((p * torch.randn_like(p)).sum(), y, retain_graph=True); g = g[keep[:n]]; G += g.T @ g
            G = G / G.trace() * H + 0.1 * torch.eye(H, device=DEV)
            ev, Q = torch.linalg.eigh(G); Gh = Q @ torch.diag(ev.sqrt()) @ Q.T; Gi = Q @ torch.diag(ev.rsqrt()) @ Q.T
            lam, B = torch.linalg.eigh(Gh @ c @ Gh); B = B.flip(1)[:, :r]; lam = lam.flip(0)[:r]
            s.E = nn.Parameter(B.T @ Gh); s.D = nn.Parameter(Gi @ B)
        else:
            lam, B = torch.linalg.eigh(c); B = B.flip(1)[:, :r]; lam = lam.flip(0)[:r]
            s.E = nn.Parameter(B.T.clone()); s.D = nn.Parameter(B.clone())
        if v.get("rotate"):
            R, _ = torch.linalg.qr(torch.randn(r, r, device=DEV)); s.E.data = R @ s.E.data; s.D.data = s.D.data @ R.T
        if v.get("scale"):  # wide dimensions narrowed: closer to equal spread per dimension
            k = lam.clamp_min(1e-6) ** (-0.25); k = k / k[0]; s.E.data = k[:, None] * s.E.data; s.D.data = s.D.data / k
        s.lam = lam.clamp_min(1e-8)
        if v.get("bits_total"):
            lo, hi = -40.0, 10.0
            for _ in range(60):
                t = (lo + hi) / 2; b = (0.5 * (s.lam.log2() - t)).clamp(0, 8).round()
                if b.sum() > v["bits_total"]: lo = t
                else: hi = t
            s.bits = (0.5 * (s.lam.log2() - hi)).clamp(0, 8).round(); s.std = s.lam.sqrt()
    def qf(s, z):
        v = s.v
        if v.get("bits_total"):
            b = s.bits; n = 2 ** b; width = torch.tensor([1.0, 1.6, 3.98, 4.7, 5.4, 6.0, 6.6, 7.2, 7.8], device=z.device)[b.long()]
            st = s.std * width / n
            code = (z / st - 0.5).round(); code = torch.minimum(torch.maximum(code, -(n / 2)), n / 2 - 1) + 0.5
            return torch.where(b > 0, code * st, torch.zeros_like(z))
        return q(z, v.get("fb", 32))
    def qb(s, g):
        v = s.v
        if v.get("bk"):
            B, S, r = g.shape; n = g.norm(dim=-1).flatten(); k = max(1, int(v["bk"] * B * S))
            t = n.topk(k).values[-1]; return (q(g, v.get("bb", 32)).view(-1, r) * (n >= t)[:, None]).view_as(g)
        if v.get("br"): return torch.cat([q(g[..., :v["br"]], v.get("bb", 32)), torch.zeros_like(g[..., v["br"]:])], -1)
        return q(g, v.get("bb", 32))
    def forward(s, ids, typ):
        v = s.v; m = (ids != 0)[:, None, None, :]; L = v["layer"]
        if v["cut"] == "none":
            x = s.embed(ids, typ)
            for l in s.layers: x = l(x, m)
        elif v["cut"] == "svd":
            x = s.embed(ids, typ)
            for l in s.layers[:L]: x = l(x, m)
            l = s.layers[L]; x = l.attend(x, m)
            z = Wire.apply(F.gelu(l.up(x)) @ s.V.T, s.qf, s.qb)
            x = l.n2(l.drop(z @ s.S.T @ s.U.T + l.down.bias))
            for l in s.layers[L + 1:]: x = l(x, m)
        else:
            if v.get("freeze"):
                with torch.no_grad(): x = s.bottom(ids, typ, m); z = s.qf((x - s.mean) @ s.E.T)
            else:
                x = s.bottom(ids, typ, m); z = Wire.apply((x - s.mean) @ s.E.T, s.qf, s.qb)
            x = z @ s.D.T + s.mean
            for l in s.layers[L + 1:]: x = l(x, m)
        return s.cls(s.drop(torch.tanh(s.pool(s.pooled(x, ids)))))
    def pooled(s, x, ids):
        if s.v.get("pooling", "first") == "first": return x[:, 0]
        k = (ids != 0).float()[..., None]; return (x * k).sum(1) / k.sum(1)

CUT = ("E", "D", "mean", "V", "S", "U")
def train_eval(v, data, seed, epochs, lr, batch=32):
    tr, dev, held = data; torch.manual_seed(seed)
    net = Net(v).to(DEV)
    if v["cut"] != "none": net.calibrate(tr[0][:1000], tr[1][:1000]); net.to(DEV)
    if v.get("freeze"):
        for p in [*net.we.parameters(), *net.pe.parameters(), *net.te.parameters(), *net.ne.parameters(), *[p for l in net.layers[:v["layer"] + 1] for p in l.parameters()], net.E, net.mean]: p.requires_grad_(False)
        for mod in net.layers[:v["layer"] + 1]: mod.drop.p = 0.0
    epochs = v.get("epochs", epochs); steps = len(tr[0]) // batch * epochs
    cutp = [p for n, p in net.named_parameters() if p.requires_grad and n in CUT]
    rest = [p for n, p in net.named_parameters() if p.requires_grad and n not in CUT]
    lrt = [torch.tensor(0.0, device=DEV), torch.tensor(0.0, device=DEV)]
    groups = [{"params": rest, "lr": lrt[0]}] + ([{"params": cutp, "lr": lrt[1]}] if cutp else [])
    everything = [p for g in groups for p in g["params"]]
    opt = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.01, **({"capturable": True, "foreach": True} if DEV == "cuda" else {"foreach": False}))
    sid, sty, sl = (torch.zeros_like(t[:batch]) for t in tr)
    def one():
        loss = F.cross_entropy(net(sid, sty), sl); loss.backward()
        n = torch.stack(torch._foreach_norm([p.grad for p in everything])).norm()
        torch._foreach_mul_([p.grad for p in everything], (1.0 / n.clamp_min(1.0)))
        opt.step(); opt.zero_grad(set_to_none=False)
    net.train()
    g = torch.Generator().manual_seed(seed); order = torch.cat([torch.randperm(len(tr[0]), generator=g) for _ in range(epochs)]).to(DEV)
    graph, side = None, torch.cuda.Stream() if DEV == "cuda" else None
    for step in range(steps):
        i = order[step * batch:(step + 1) * batch]
        sid.copy_(tr[0][i]); sty.copy_(tr[1][i]); sl.copy_(tr[2][i])
        rate = lr * min(1.0, (step + 1) / (0.1 * steps)) * (1 - max(0, step - 0.1 * steps) / (0.9 * steps))
        lrt[0].fill_(rate); lrt[1].fill_(rate * v.get("cutlr", 1.0))
        if side is None: one()
        elif step < 3:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side): one()
            torch.cuda.current_stream().wait_stream(side)
        else:
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph): one()
            graph.replay()
    net.eval(); out = []
    with torch.no_grad():
        for part in (dev, held):
            ok = 0
            for k in range(0, len(part[0]), 512): ok += (net(part[0][k:k+512], part[1][k:k+512]).argmax(-1) == part[2][k:k+512]).sum()
            out.append(round(100 * float(ok) / len(part[0]), 2))
    return out

def variants():
    V = [dict(name="unsplit", cut="none", layer=0), dict(name="unsplit-mean", cut="none", layer=0, pooling="mean")]
    for L in (0, 2, 4):
        a = lambda name, cut="pca", **k: V.append(dict(name=name, layer=L, cut=cut, **k))
        a("svd r8", "svd", r=8)
        a("svd r8 cutlr10", "svd", r=8, cutlr=10.0)
        a("pca r8", r=8)
        a("pca r60 4/4", r=60, fb=4, bb=4)
        a("pca r60 4/4 rot", r=60, fb=4, bb=4, rotate=1)
        a("pca r60 4/4 scale", r=60, fb=4, bb=4, scale=1)
        a("bal r60 4/4", "balanced", r=60, fb=4, bb=4)
        a("bal r60 4/4 rot", "balanced", r=60, fb=4, bb=4, rotate=1)
        a("pca r60 4/4 cutlr10", r=60, fb=4, bb=4, cutlr=10.0)
        a("pca r96 4/1 rot", r=96, fb=4, bb=1, rotate=1)
        a("pca r160 2/1 rot", r=160, fb=2, bb=1, rotate=1)
        a("pca r112 4 / .2 rows 2bit", r=112, fb=4, bb=2, bk=0.2, rotate=1)
        a("pca r112 4 / 40x1", r=112, fb=4, bb=1, br=40)
        a("bal r112 4 / 40x1", "balanced", r=112, fb=4, bb=1, br=40)
        a("klt 400 bits /1 (r96)", r=96, bits_total=400, bb=1)
        a("bal klt 400 /1 r96", "balanced", r=96, bits_total=400, bb=1)
        a("freeze pca r124 4", r=124, fb=4, freeze=1)
        a("freeze bal r124 4 rot", "balanced", r=124, fb=4, freeze=1, rotate=1)
        a("freeze bal klt 512", "balanced", r=384, bits_total=512, freeze=1)
        a("freeze full int4 (once)", r=384, fb=4, freeze=1, rotate=1)
        a("16x4/16x2 (16B)", r=16, fb=4, bb=2)
        a("r384 fp", r=384)
    return V

if __name__ == "__main__":
    part, parts, budget = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]); t0 = time.time()
    out = open(sys.argv[4], "a")
    todo = [(seed, v, task) for seed in (1, 2, 3) for task in ("sst2", "qnli") for v in variants()]
    n, held = int(os.environ.get("NTRAIN", 16000)), int(os.environ.get("NHELD", 8000))
    data = {"sst2": read("sst2", 40, n, held), "qnli": read("qnli", 96, n, held // 2)}
    print("loaded", time.time() - t0, file=out, flush=True)
    for seed, v, task in todo[part::parts]:
        if time.time() - t0 > budget: break
        t = time.time()
        try: acc = train_eval(v, data[task], seed, 1, 1e-4)
        except Exception as e: acc = [repr(e)[:300]]
        print(json.dumps([task, v["name"], v["layer"], seed, acc, round(time.time() - t, 1)]), file=out, flush=True)
