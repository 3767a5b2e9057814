"""The classes of diloco.proto, made of its compiled form; `scripts/gen_proto` renews that and their types (.pyi).

As the module that protoc would write, without the offsets of every message, which only a protobuf without C needs.
"""

from pathlib import Path

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.internal import builder

_compiled = descriptor_pb2.FileDescriptorSet.FromString(Path(__file__).with_name("diloco.binpb").read_bytes())
DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(_compiled.file[0].SerializeToString())
builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
