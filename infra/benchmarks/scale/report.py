NAME = "bench-scale"
def name(row): 
    f = f", {row.killed} killed, {row.paused} paused" if row.killed or row.paused else ""
    return f"{row.carrier}, {row.workers} workers, {row.size/1e9:.3g} GB{f}"
def write(results, found):
    import json; (results/'bench-scale.json').write_text(json.dumps(found,indent=1)+"\n"); return 0
