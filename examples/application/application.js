#!/usr/bin/env node
// The same application as application.py, for Node.
//
//     application.js PORT      (0 for a free one, which is printed)

const { createHash } = require('node:crypto');
const { createServer } = require('node:http');

const MAGIC = '258EAFA5-E914-47DA-95CA-C5AB0DC85B11';

const server = createServer((request, response) => {
    const body = request.url === '/health' ? 'well' : `hello from ${server.address().port}\n`;
    response.writeHead(200, { 'Content-Type': 'text/plain' }).end(body);
});

server.on('upgrade', (request, socket) => {
    const accept = createHash('sha1').update(request.headers['sec-websocket-key'] + MAGIC).digest('base64');
    socket.write('HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n' +
        `Sec-WebSocket-Accept: ${accept}\r\n\r\n`);
    let received = Buffer.alloc(0);
    // Short frames alone: what a demonstration needs.
    socket.on('data', data => {
        received = Buffer.concat([received, data]);
        while (received.length >= 6 && received.length >= 6 + (received[1] & 127)) {
            const length = received[1] & 127, mask = received.subarray(2, 6);
            const text = received.subarray(6, 6 + length).map((byte, place) => byte ^ mask[place % 4]);
            if ((received[0] & 15) !== 1) return socket.end();
            socket.write(Buffer.concat([Buffer.from([0x81, length]), text]));
            received = received.subarray(6 + length);
        }
    });
    socket.on('error', () => {});
});

server.listen(Number(process.argv[2]), '127.0.0.1', () => {
    process.stderr.write(`listening on ${server.address().port}\n`);
});
