// Cycles per AVX2 instruction, and per sequence of those that multiply 32 bytes: independent ones in a loop.
#include <immintrin.h>
#include <stdio.h>
#include <time.h>
#include <stdint.h>
static double now(){struct timespec t;clock_gettime(CLOCK_THREAD_CPUTIME_ID,&t);return t.tv_sec+1e-9*t.tv_nsec;}
#define REP8(x) x x x x x x x x
#define N 20000000
double ghz;
#define RUN(name,ops,body) {double best=1e9;for(int k=0;k<5;k++){double t=now();for(long i=0;i<N/10;i++){asm volatile(body:::"ymm0","ymm1","ymm2","ymm3","ymm4","ymm5","ymm6","ymm7","ymm8","ymm9","ymm10","ymm11","ymm12","ymm13","ymm14","ymm15");}t=now()-t;if(t<best)best=t;}printf("%-50s %.3f cycles per unit\n",name,best*ghz*1e9/(N/10)/ops);}
int main(){
 double best=1e9;for(int k=0;k<5;k++){double t=now();uint64_t a=1;for(long i=0;i<N;i++){asm volatile(REP8("lea 1(%0),%0\n"):"+r"(a));}t=now()-t;if(t<best)best=t;}
 ghz=N*8/best/1e9;printf("GHz %.3f\n",ghz);
 RUN("vpsignb",8,"vpsignb %%ymm14,%%ymm15,%%ymm0\nvpsignb %%ymm14,%%ymm15,%%ymm1\nvpsignb %%ymm14,%%ymm15,%%ymm2\nvpsignb %%ymm14,%%ymm15,%%ymm3\nvpsignb %%ymm14,%%ymm15,%%ymm4\nvpsignb %%ymm14,%%ymm15,%%ymm5\nvpsignb %%ymm14,%%ymm15,%%ymm6\nvpsignb %%ymm14,%%ymm15,%%ymm7\n");
#define FOUR(op) op" %%ymm14,%%ymm15,%%ymm0\n"op" %%ymm14,%%ymm15,%%ymm1\n"op" %%ymm14,%%ymm15,%%ymm2\n"op" %%ymm14,%%ymm15,%%ymm3\n"
#define FOURB(op) op" %%ymm14,%%ymm15,%%ymm4\n"op" %%ymm14,%%ymm15,%%ymm5\n"op" %%ymm14,%%ymm15,%%ymm6\n"op" %%ymm14,%%ymm15,%%ymm7\n"
 RUN("vpmaddubsw",4,FOUR("vpmaddubsw"));
 RUN("vpmaddwd",4,FOUR("vpmaddwd"));
 RUN("vpaddd",4,FOUR("vpaddd"));
 RUN("vpshufb",4,FOUR("vpshufb"));
 RUN("vpmulld",4,FOUR("vpmulld"));
 RUN("vpmullw",4,FOUR("vpmullw"));
 RUN("vpsignb+vpmaddubsw (pair)",4,FOUR("vpsignb") FOURB("vpmaddubsw"));
 RUN("vpsignb+vpshufb (pair)",4,FOUR("vpsignb") FOURB("vpshufb"));
 RUN("vpaddw+vpmaddubsw (pair)",4,FOUR("vpaddw") FOURB("vpmaddubsw"));
 RUN("sign+ubs+wd+add",1,"vpsignb %%ymm14,%%ymm15,%%ymm0\nvpmaddubsw %%ymm0,%%ymm13,%%ymm0\nvpmaddwd %%ymm0,%%ymm12,%%ymm0\nvpaddd %%ymm0,%%ymm1,%%ymm1\n");
#define SET(a,b) "vpsignb %%ymm14,%%ymm15,%%ymm"a"\nvpmaddubsw %%ymm"a",%%ymm13,%%ymm"a"\nvpmaddwd %%ymm"a",%%ymm12,%%ymm"a"\nvpaddd %%ymm"a",%%ymm"b",%%ymm"b"\n"
 RUN("sign+ubs+wd+add, 4 chains",4,SET("0","4") SET("1","5") SET("2","6") SET("3","7"));
#define SETW(a,b) "vpmaddwd %%ymm15,%%ymm13,%%ymm"a"\nvpmaddwd %%ymm14,%%ymm12,%%ymm11\nvpaddd %%ymm"a",%%ymm"b",%%ymm"b"\nvpaddd %%ymm11,%%ymm"b",%%ymm"b"\n"
 RUN("2 wd + 2 add, 4 chains",4,SETW("0","4") SETW("1","5") SETW("2","6") SETW("3","7"));
#define SETQ(a,b) "vpmaddubsw %%ymm15,%%ymm13,%%ymm"a"\nvpaddw %%ymm"a",%%ymm"b",%%ymm"b"\n"
 RUN("ubs + addw, 4 chains",4,SETQ("0","4") SETQ("1","5") SETQ("2","6") SETQ("3","7"));

 RUN("vpabsb",4,"vpabsb %%ymm14,%%ymm0\nvpabsb %%ymm14,%%ymm1\nvpabsb %%ymm14,%%ymm2\nvpabsb %%ymm14,%%ymm3\n");
 RUN("vpabsb + maddubs pair",4,"vpabsb %%ymm14,%%ymm0\nvpabsb %%ymm14,%%ymm1\nvpabsb %%ymm14,%%ymm2\nvpabsb %%ymm14,%%ymm3\n" FOURB("vpmaddubsw"));
 RUN("vpabsb + pshufb pair",4,"vpabsb %%ymm14,%%ymm0\nvpabsb %%ymm14,%%ymm1\nvpabsb %%ymm14,%%ymm2\nvpabsb %%ymm14,%%ymm3\n" FOURB("vpshufb"));
 RUN("vpsrld + maddubs",4,"vpsrld $4,%%ymm14,%%ymm0\nvpsrld $4,%%ymm14,%%ymm1\nvpsrld $4,%%ymm14,%%ymm2\nvpsrld $4,%%ymm14,%%ymm3\n" FOURB("vpmaddubsw"));
 RUN("vpsrld + pshufb",4,"vpsrld $4,%%ymm14,%%ymm0\nvpsrld $4,%%ymm14,%%ymm1\nvpsrld $4,%%ymm14,%%ymm2\nvpsrld $4,%%ymm14,%%ymm3\n" FOURB("vpshufb"));
#define SETX(a,b) "vpxor %%ymm14,%%ymm15,%%ymm"a"\nvpmaddubsw %%ymm"a",%%ymm13,%%ymm"a"\nvpmaddwd %%ymm"a",%%ymm12,%%ymm"a"\nvpaddd %%ymm"a",%%ymm"b",%%ymm"b"\n"
 RUN("xor+ubs+wd+add, 4 chains",4,SETX("0","4") SETX("1","5") SETX("2","6") SETX("3","7"));
#define SETXS(a,b) "vpxor %%ymm14,%%ymm15,%%ymm"a"\nvpsubb %%ymm14,%%ymm"a",%%ymm"a"\nvpmaddubsw %%ymm"a",%%ymm13,%%ymm"a"\nvpmaddwd %%ymm"a",%%ymm12,%%ymm"a"\nvpaddd %%ymm"a",%%ymm"b",%%ymm"b"\n"
 RUN("xor+sub+ubs+wd+add, 4 chains",4,SETXS("0","4") SETXS("1","5") SETXS("2","6") SETXS("3","7"));
 RUN("mixed sign/xorsub",4,SETXS("0","4") SET("1","5") SETXS("2","6") SET("3","7"));
 RUN("mixed xor, 2 of 3 sign",3,SETX("0","4") SET("1","5") SETXS("2","6"));
 return 0;}
