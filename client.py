import os, sys, time, random, signal
import prefect
from prefect import flow, task
@task
def t(i):
    return i
@task(persist_result=False)
def s(x): time.sleep(0.05); return x
def make(n):
    @flow(name="load", log_prints=True)
    def load():
        fs=[t.submit(i) for i in range(n)]
        print("hello")
        for f in fs: f.result()
        sub()
    @flow(name="sub")
    def sub():
        for i in range(5): s(i)
    return load
def child(seed):
    random.seed(seed)
    f=make(int(os.environ.get("N","10")))
    while True:
        try: f()
        except Exception as e: print("ERR",type(e),str(e)[:200],file=sys.stderr,flush=True)
end=time.time()+float(sys.argv[1]); P=int(sys.argv[2]); kids={}; n=0; kill=len(sys.argv)>3
while time.time()<end:
    while len(kids)<P:
        n+=1; pid=os.fork()
        if pid==0:
            child(n); os._exit(0)
        kids[pid]=time.time()+random.uniform(4,14)
    time.sleep(0.1)
    for pid,d in list(kids.items()):
        if kill and time.time()>d:
            os.kill(pid,9); os.waitpid(pid,0); del kids[pid]
for pid in kids: os.kill(pid,9); os.waitpid(pid,0)
print("children",n)
