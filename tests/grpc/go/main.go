// A client and a server of gRPC in Go, whose library differs from that of Python: it measures the path with PINGs and
// opens windows in small steps. Messages are bytes, so that nothing is generated.
//
//	grpc server [CERTIFICATE KEY]       serves, and says its port
//	grpc client ADDRESS [AUTHORITY]     calls that service by way of ADDRESS, and says what came of it
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const patience = 60 * time.Second

func main() {
	log.SetFlags(0)
	arguments := append(os.Args[1:], "", "", "")
	switch arguments[0] {
	case "server":
		serve(arguments[1], arguments[2])
	case "client":
		call(arguments[1], arguments[2])
	default:
		log.Fatal("server or client?")
	}
}

// Messages as they are.
type plain struct{}

func (plain) Name() string { return "plain" }

func (plain) Marshal(message any) ([]byte, error) { return *message.(*[]byte), nil }

func (plain) Unmarshal(bytes []byte, message any) error {
	*message.(*[]byte) = append([]byte(nil), bytes...)
	return nil
}

func serve(certificate, key string) {
	options := []grpc.ServerOption{grpc.UnknownServiceHandler(answer), grpc.ForceServerCodec(plain{})}
	if certificate != "" {
		pair, err := credentials.NewServerTLSFromFile(certificate, key)
		check(err)
		options = append(options, grpc.Creds(pair))
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(err)
	fmt.Println(listener.Addr().(*net.TCPAddr).Port)
	check(grpc.NewServer(options...).Serve(listener))
}

func answer(_ any, stream grpc.ServerStream) error {
	method, _ := grpc.MethodFromServerStream(stream)
	var first []byte
	if method == "/test.Service/Unary" || method == "/test.Service/Down" {
		if err := stream.RecvMsg(&first); err != nil {
			return err
		}
	}
	switch method {
	case "/test.Service/Unary":
		stream.SetTrailer(metadata.Pairs("x-trail", "1"))
		return send(stream, append([]byte("hello "), first...))
	case "/test.Service/Down":
		count, err := strconv.Atoi(string(first))
		if err != nil {
			return status.Error(codes.InvalidArgument, "no number")
		}
		for range count {
			if err := send(stream, make([]byte, 1000)); err != nil {
				return err
			}
		}
		return nil
	case "/test.Service/Up":
		sum, err := 0, error(nil)
		for err == nil {
			var message []byte
			err = stream.RecvMsg(&message)
			sum += len(message)
		}
		if err != io.EOF {
			return err
		}
		return send(stream, []byte(strconv.Itoa(sum)))
	case "/test.Service/Both":
		for {
			var message []byte
			if err := stream.RecvMsg(&message); err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
			if err := send(stream, append([]byte("re "), message...)); err != nil {
				return err
			}
		}
	case "/test.Service/Silent":
		<-stream.Context().Done()
		return status.FromContextError(stream.Context().Err()).Err()
	}
	return status.Error(codes.NotFound, "no such thing")
}

func send(stream grpc.ServerStream, message []byte) error { return stream.SendMsg(&message) }

// What the client has to call with.
type caller struct {
	*grpc.ClientConn
	dials atomic.Int64
}

func call(address, authority string) {
	calls := &caller{}
	transport := insecure.NewCredentials()
	if authority != "" {
		pem, err := os.ReadFile(authority)
		check(err)
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(pem)
		transport = credentials.NewTLS(&tls.Config{RootCAs: pool, ServerName: "grpc.example"})
	}
	dial := func(ctx context.Context, address string) (net.Conn, error) {
		calls.dials.Add(1)
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	}
	connection, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(transport),
		grpc.WithContextDialer(dial), grpc.WithDefaultCallOptions(grpc.ForceCodec(plain{})))
	check(err)
	calls.ClientConn = connection

	fmt.Println("unary:", calls.oneByOne(3000))
	fmt.Println("at once:", calls.atOnce(3000, 100))
	fmt.Println("down:", calls.down(2000))
	fmt.Println("up:", calls.up(300, 10_000))
	fmt.Println("both:", calls.both(1000))
	fmt.Println("large:", calls.large(3_000_000))
	fmt.Println("failing:", told(calls.failing("/test.Service/Failing")))
	fmt.Println("deadline:", calls.silent(context.WithTimeout(context.Background(), 200*time.Millisecond)))
	cancelled, cancel := context.WithCancel(context.Background())
	time.AfterFunc(200*time.Millisecond, cancel)
	fmt.Println("cancelled:", calls.silent(cancelled, cancel))
	// The words are the library's own: it goes by the status of HTTP.
	fmt.Println("denied:", status.Code(calls.failing("/denied/Method")))
	fmt.Println("absent:", status.Code(calls.failing("/absent/Method")))
	fmt.Println("connections:", calls.dials.Load())
}

func (calls *caller) unary(message string) error {
	in, out, trailer := []byte(message), []byte(nil), metadata.MD{}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := calls.Invoke(ctx, "/test.Service/Unary", &in, &out, grpc.Trailer(&trailer)); err != nil {
		return err
	}
	if string(out) != "hello "+message || len(trailer["x-trail"]) != 1 {
		return fmt.Errorf("%q with %v", out, trailer)
	}
	return nil
}

func (calls *caller) oneByOne(count int) string {
	for number := range count {
		if err := calls.unary(strconv.Itoa(number)); err != nil {
			return fmt.Sprint("number ", number, ": ", err)
		}
	}
	return fmt.Sprint(count, " of ", count)
}

func (calls *caller) atOnce(count, width int) string {
	var right, next atomic.Int64
	var first atomic.Value
	var group sync.WaitGroup
	for range width {
		group.Add(1)
		go func() {
			defer group.Done()
			for number := next.Add(1); number <= int64(count); number = next.Add(1) {
				if err := calls.unary(strconv.FormatInt(number, 10)); err == nil {
					right.Add(1)
				} else {
					first.CompareAndSwap(nil, err.Error())
				}
			}
		}()
	}
	group.Wait()
	text := fmt.Sprint(right.Load(), " of ", count)
	if err := first.Load(); err != nil {
		text += fmt.Sprint(", ", err)
	}
	return text
}

func (calls *caller) open(ctx context.Context, method string) grpc.ClientStream {
	stream, err := calls.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, method)
	check(err)
	return stream
}

func (calls *caller) down(count int) string {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	stream := calls.open(ctx, "/test.Service/Down")
	question := []byte(strconv.Itoa(count))
	check(stream.SendMsg(&question))
	check(stream.CloseSend())
	messages, bytes := 0, 0
	for {
		var message []byte
		if err := stream.RecvMsg(&message); err == io.EOF {
			return fmt.Sprint(messages, " messages, ", bytes, " bytes")
		} else if err != nil {
			return err.Error()
		}
		messages, bytes = messages+1, bytes+len(message)
	}
}

func (calls *caller) up(count, size int) string {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	stream := calls.open(ctx, "/test.Service/Up")
	piece := make([]byte, size)
	for range count {
		check(stream.SendMsg(&piece))
	}
	check(stream.CloseSend())
	var sum []byte
	check(stream.RecvMsg(&sum))
	return string(sum)
}

func (calls *caller) both(count int) string {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	stream := calls.open(ctx, "/test.Service/Both")
	for number := range count {
		question, heard := []byte(strconv.Itoa(number)), []byte(nil)
		check(stream.SendMsg(&question))
		check(stream.RecvMsg(&heard))
		if string(heard) != "re "+strconv.Itoa(number) {
			return string(heard)
		}
	}
	check(stream.CloseSend())
	var rest []byte
	if err := stream.RecvMsg(&rest); err != io.EOF {
		return fmt.Sprint("no end: ", err)
	}
	return fmt.Sprint(count, " of ", count)
}

func (calls *caller) large(size int) string {
	in, out := make([]byte, size), []byte(nil)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := calls.Invoke(ctx, "/test.Service/Unary", &in, &out); err != nil {
		return err.Error()
	}
	return fmt.Sprint(len(out))
}

func (calls *caller) failing(method string) error {
	in, out := []byte(nil), []byte(nil)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return calls.Invoke(ctx, method, &in, &out)
}

func (calls *caller) silent(ctx context.Context, cancel context.CancelFunc) string {
	defer cancel()
	in, out := []byte(nil), []byte(nil)
	return status.Code(calls.Invoke(ctx, "/test.Service/Silent", &in, &out)).String()
}

func told(err error) string { return status.Code(err).String() + " " + status.Convert(err).Message() }

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
