import urllib.request, json, os, sys, time, base64
api=os.environ["PREFECT_API_URL"]; H={"Authorization":"Basic "+base64.b64encode(b"tests:word").decode(),"Content-Type":"application/json"}
def ask(path, body, method="POST"):
    r=urllib.request.Request(api+path, data=json.dumps(body).encode() if body is not None else None, headers=H, method=method)
    return urllib.request.urlopen(r,timeout=150).read()
end=time.time()+float(sys.argv[1]); slow=[]; n=0; errs=0; all_=[]
fl=json.loads(ask("/flows/",{"name":"probe"}))["id"]
while time.time()<end:
    for path,body in (("/flow_runs/filter",{"limit":20}),("/logs/",[{"name":"x","level":20,"message":"m","timestamp":"2026-11-28T00:00:00Z"}]),("/flow_runs/",{"flow_id":fl,"state":{"type":"PENDING"}}),("/work_pools/pool/get_scheduled_flow_runs",{})):
        t=time.time()
        try: ask(path,body)
        except Exception as e:
            errs+=1; print(time.strftime("%H:%M:%S"),"ERR",path,e, flush=True)
        d=time.time()-t; n+=1; all_.append(d)
        if d>5: slow.append((time.strftime("%H:%M:%S"),path,round(d,1))); print(slow[-1],flush=True)
    time.sleep(0.3)
all_.sort()
print("requests",n,"over5",len(slow),"errs",errs,"p50 %.3f p99 %.3f max %.2f"%(all_[n//2],all_[int(n*.99)],all_[-1]))
