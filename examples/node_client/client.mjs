// Publishes heartbeats, consumes them in a group, acks them; one is nacked and comes again.
//
//   npm install && BUS_URL=ws://127.0.0.1:7070 node client.mjs

import WebSocket from 'ws';

const COUNT = 20;
const url = process.env.BUS_URL || 'ws://127.0.0.1:7070';
const ws = new WebSocket(url, process.env.BUS_TOKEN
  ? { headers: { Authorization: `Bearer ${process.env.BUS_TOKEN}` } }
  : {});
const send = (frame) => ws.send(JSON.stringify(frame));
const seen = new Set();
const done = { published: 0, received: 0, retried: 0, errors: 0 };

const finish = () => {
  if (done.published < COUNT || seen.size < COUNT || !done.retried || !done.errors) return;
  done.received = seen.size;
  console.log(JSON.stringify(done));
  ws.close();
};

ws.on('open', () => {
  send({
    type: 'SUBSCRIBE', topic: 'heartbeat.received', group: 'monitor',
    from: { kind: 'offset', value: 0 }, max_inflight: 32, ack: 'each',
  });
});

ws.on('message', (buf) => {
  const frame = JSON.parse(buf.toString());
  switch (frame.type) {
    case 'OK':
      if (frame.corr !== undefined) break;
      for (let i = 0; i < COUNT; i += 1) {
        send({
          type: 'PUBLISH', topic: 'heartbeat.received', key: `proc:${i}`,
          headers: { ct: 'json' }, payload: { pid: process.pid, i },
        });
      }
      ws.send('this is no frame');
      break;
    case 'PUBLISHED':
      done.published += 1;
      break;
    case 'MESSAGE': {
      const { topic, partition, group, offset, attempt, envelope } = frame;
      if (envelope.payload.i === 7 && attempt === 1) {
        send({ type: 'NACK', topic, partition, group, offset, reason: 'once more' });
        break;
      }
      if (attempt > 1) done.retried += 1;
      seen.add(envelope.payload.i);
      send({ type: 'ACK', topic, partition, group, offset });
      break;
    }
    case 'ERROR':
      if (frame.code === 'bad_frame') done.errors += 1;
      else { console.error(frame); process.exit(1); }
      break;
    default:
  }
  finish();
});

ws.on('error', (error) => { console.error(String(error)); process.exit(1); });
setTimeout(() => { console.error('too slow', done, seen.size); process.exit(1); }, 20_000).unref();
