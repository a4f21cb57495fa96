// One row times weights of four bits that index levels: as signs and magnitudes (sign1, abs1), and as an index plus a residual
// (planes1). The table's values do not matter to the time.
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <stdint.h>
static double now(){struct timespec t;clock_gettime(CLOCK_THREAD_CPUTIME_ID,&t);return t.tv_sec+1e-9*t.tv_nsec;}
#define BAR(x) asm volatile("":"+x"(x))
typedef __m256i V;
#define LD(p) _mm256_loadu_si256((const V*)(p))
#define U _Pragma("GCC unroll 8")
static V T1,T2,T3;
// w: per scale 4 quads x 64 bytes; x 8 words per scale
#define SIGN(W,X,S,h) {V a=_mm256_shuffle_epi8(t1,W),b=_mm256_shuffle_epi8(t2,W);s[h]=_mm256_add_epi32(s[h],_mm256_madd_epi16(_mm256_maddubs_epi16(a,_mm256_sign_epi8(X,b)),S));BAR(s[h]);}
#define ABS(W,X,S,h) {V b=_mm256_shuffle_epi8(t2,W),a=_mm256_abs_epi8(b);s[h]=_mm256_add_epi32(s[h],_mm256_madd_epi16(_mm256_maddubs_epi16(a,_mm256_sign_epi8(X,b)),S));BAR(s[h]);}
#define ONE(name,OP,NB) __attribute__((noinline)) void name(const uint8_t*w,const int*x,const V*sc,V*out,int blocks){ V s[2]={0,0};V t1=T1,t2=T2;BAR(t1);BAR(t2);const V m=_mm256_set1_epi8(15);\
 for(int k=0;k<8*blocks;k++){ const V*S=sc+(k&7)*2; const uint8_t*p=w+k*256; \
  U for(int g=0;g<4;g++){V X=_mm256_set1_epi32(x[k*8+g]); U for(int h=0;h<2;h++){V W=_mm256_and_si256(LD(p+g*64+h*32),m); OP(W,X,S[h],h)}}\
  U for(int g=0;g<4;g++){V X=_mm256_set1_epi32(x[k*8+4+g]); U for(int h=0;h<2;h++){V W=_mm256_and_si256(_mm256_srli_epi32(LD(p+g*64+h*32),4),m); OP(W,X,S[h],h)}}}\
 out[0]=s[0];out[1]=s[1];}
ONE(sign1,SIGN,0)
ONE(abs1,ABS,0)
#define PL(W,X,h,g) {V a=_mm256_maddubs_epi16(W,X);V b=_mm256_maddubs_epi16(_mm256_shuffle_epi8(t1,W),X); n[h]=g==0?a:_mm256_add_epi16(n[h],a); r[h]=(g&3)==0?b:_mm256_add_epi16(r[h],b); if((g&3)==3){s[h]=_mm256_add_epi32(s[h],_mm256_madd_epi16(r[h],S[h]));} if(g==7)s2[h]=_mm256_add_epi32(s2[h],_mm256_madd_epi16(n[h],S[h]));BAR(r[h]);BAR(n[h]);}
__attribute__((noinline)) void planes1(const uint8_t*w,const int*x,const V*sc,V*out,int blocks){ V s[2]={0,0},s2[2]={0,0};V t1=T1;BAR(t1);const V m=_mm256_set1_epi8(15);
 for(int k=0;k<8*blocks;k++){ const V*S=sc+(k&7)*2; const uint8_t*p=w+k*256; V n[2],r[2];
  U for(int g=0;g<4;g++){V X=_mm256_set1_epi32(x[k*8+g]); U for(int h=0;h<2;h++){V W=_mm256_and_si256(LD(p+g*64+h*32),m); PL(W,X,h,g)}}
  U for(int g=4;g<8;g++){V X=_mm256_set1_epi32(x[k*8+g]); U for(int h=0;h<2;h++){V W=_mm256_and_si256(_mm256_srli_epi32(LD(p+(g-4)*64+h*32),4),m); PL(W,X,h,g)}}}
 out[0]=_mm256_add_epi32(s[0],_mm256_slli_epi32(s2[0],4));out[1]=_mm256_add_epi32(s[1],_mm256_slli_epi32(s2[1],4));}
int main(){ int blocks=64; uint8_t*w=aligned_alloc(64,blocks*2048);int*x=aligned_alloc(64,blocks*256+64);V*sc=aligned_alloc(64,16*32);V*out=aligned_alloc(64,16*32);
 for(int i=0;i<blocks*2048;i++)w[i]=rand();for(int i=0;i<blocks*64;i++)x[i]=rand()&0x7f7f7f7f;for(int i=0;i<16*16;i++)((int16_t*)sc)[i]=i%32;
 for(int i=0;i<32;i++){((uint8_t*)&T1)[i]=i%16*8;((int8_t*)&T2)[i]=i%16*8-64;}
 double ghz=3.666;
#define B(f) {double b=1e9;for(int k=0;k<15;k++){double t=now();for(int i=0;i<500;i++){f(w,x,sc,out,blocks);asm volatile("":::"memory");}t=now()-t;if(t<b)b=t;}b/=500;printf("%-8s %.1f G/s, %.2f cycles per quad of 8 outputs\n",#f,256.0*blocks*16/b*1e-9,b*ghz*1e9/(64.0*blocks*2));}
 B(sign1)B(abs1)B(planes1) B(sign1)B(abs1)B(planes1)}
