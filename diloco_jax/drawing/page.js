const tip=document.body.appendChild(document.createElement('div'));tip.className='tip';tip.hidden=true;
const si=(v,units)=>{let n=0;while(Math.abs(v)>=999.5&&n<4){v/=1e3;n++}
return (n?v.toPrecision(3):v.toFixed(0))+units[n]};
const write={count:v=>si(v,['','k','M','G','T']),number:v=>v.toFixed(3),share:v=>(100*v).toFixed(1)+'%'};
for(const svg of document.querySelectorAll('svg.chart')){
const d=svg.dataset,[x0,x1]=d.x.split(',').map(Number),[y0,y1]=d.y.split(',').map(Number),kx=d.x.split(',')[2];
const at_share=(low,high,log,share)=>log?low*(high/low)**share:low+share*(high-low);
const ky=d.y.split(',')[2],log_x=d.x.endsWith('1'),log_y=d.y.endsWith('1');
const [left,top,right,bottom]=d.area.split(',').map(Number);
const curves=[...svg.querySelectorAll('.line')].map(
e=>({e,p:e.getAttribute('points').split(' ').map(q=>q.split(',').map(Number))}));
const cross=svg.appendChild(document.createElementNS(svg.namespaceURI,'path'));cross.setAttribute('class','cross');
const hide=()=>{tip.hidden=true;cross.removeAttribute('d')};
svg.addEventListener('pointerleave',hide);
svg.addEventListener('pointermove',ev=>{
const at=new DOMPoint(ev.clientX,ev.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
if(at<left||at>right)return hide();
cross.setAttribute('d',`M${at} ${top}V${bottom}`);tip.replaceChildren();
tip.append(write[kx](at_share(x0,x1,log_x,(at-left)/(right-left))));
for(const {e,p} of curves){
const q=p.reduce((a,b)=>Math.abs(b[0]+left-at)<Math.abs(a[0]+left-at)?b:a),share=1-q[1]/(bottom-top);
const row=tip.appendChild(document.createElement('div')),chip=row.appendChild(document.createElement('i'));
chip.style.setProperty('--c',getComputedStyle(e).stroke);
row.append(e.dataset.name.split(',')[0]+'  '+write[ky](at_share(y0,y1,log_y,share)))}
tip.hidden=false;
tip.style.left=Math.min(ev.clientX+16,innerWidth-tip.offsetWidth-8)+'px';tip.style.top=ev.clientY+16+'px'})}
