import heapq
Q=0.5625
def split(outputs,row,b):
    c=max(1,int(b//row)); c=-(-c//16)*16; t=[]
    while outputs>c: t.append(c); outputs-=c
    return t+[outputs]
def makespan(t,n):
    h=[0]*n
    for x in t: heapq.heapreplace(h,h[0]+x)
    return max(h)
def regions(layer):
    hd=512 if layer%5==4 else 256; ffn=6144 if layer<15 else 12288; H=1536
    return [[(8*hd,H,1)]+([(hd,H,1)]*2 if layer<15 else []),[(H,8*hd,1)],[(ffn,H,2)],[(H,ffn,1)],[(256,H,1)],[(H,256,1)]]
for n in (1,2,4,8,16):
    r=[]
    for new in (False,True):
        tot=span=0
        for l in range(35):
            for mats in regions(l):
                g=sum(o*i*Q for o,i,k in mats)
                b=min(max(g/(4*n),32<<10),256<<10) if new else 256<<10
                t=[]
                for o,i,k in mats:
                    if k==2 and not new: t+=[c*i*Q for c in split(o,i*Q,b)]*2
                    else: t+=[c*i*Q*k for c in split(o,i*Q,b)]
                tot+=sum(t); span+=makespan(t,n)
        r.append(tot/n/span)
    print(n,'threads: before %.3f after %.3f'%tuple(r))
